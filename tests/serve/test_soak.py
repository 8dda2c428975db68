"""A few seconds of the soak test of `tests.serve.soak`."""

from __future__ import annotations

import asyncio
import os

from tests.serve.soak import SECRET, Held, growth_mib, send_requests


def test_clients_of_every_kind_get_their_status(free, caplog):
    caplog.set_level("INFO")
    looked = []
    samples, clients = asyncio.run(send_requests(free.url, os.getpid(), 4.0, 15.0, 1.0, looked.append))
    free.wait_until_free()
    assert looked == samples and len(samples) >= 4 and clients.unexpected == []
    assert {said.split()[0] for said in clients.seen} == {"whole", "leave", "refused", "half", "look"}
    assert samples[-1].requests == clients.seen.total() > 30
    assert all(each.rss_mib > 100 and each.threads > 2 and each.files > 3 for each in samples)
    assert SECRET not in caplog.text


def test_growth_is_between_quarters():
    samples = [Held(float(i), rss, 1, 1, 0.0, 0) for i, rss in enumerate((1, 90, 100, 100, 101, 103, 103, 104))]
    assert growth_mib(samples) == 3
