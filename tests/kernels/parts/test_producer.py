"""What the copying warp asks for, and when: run as Python, beside the list of all that its block multiplies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.pipeline import advance
from lowbit.kernels.parts.producer import absent_bytes, load, load_x
from lowbit.kernels.parts.schedule import count, first_token_of, iterations_of, part_of, tile_at
from tests.kernels.parts.plain import GL, plain


class Stages(list):
    """Stages, or barriers, by number."""

    def index(self, i):
        return self[i]


class Stage(int):
    """A stage of x, of which pieces have the number of their first row too."""

    def slice(self, first, rows):
        return self


def asked_for(block, blocks, tiles, C):
    """What `load` does in a block, in order: (name, ..) for each step."""
    log: list[tuple] = []
    note = {name: lambda *_, name=name: log.append((name,)) for name in ("say_ready", "start_next", "await_previous")}
    gl = SimpleNamespace(
        **{
            **vars(GL),
            "program_id": lambda axis: block,
            "num_programs": lambda axis: blocks,
            "maximum": max,
            "cdiv": lambda a, b: -(-a // b),
            "constexpr": object,
        }
    )
    stages = Stages(Stage(i) for i in range(C.stages))
    copies = SimpleNamespace(x_desc="x", x=stages, barriers=Stages(range(C.stages)), tiles=tiles)
    copy = lambda desc, at, full, stage: log.append(("x", full, int(stage), *at))  # noqa: E731
    plain(
        load,
        gl=gl,
        **note,
        expect=lambda barriers, stage, absent, C: log.append(("expect", stage, absent)),
        acquire=lambda barriers, stage, phase, absent, C: log.append(("acquire", stage, phase, absent)),
        absent_bytes=plain(absent_bytes, gl=gl),
        load_x=plain(load_x, gl=gl, tma_load=copy),
        count=plain(count),
        tile_at=plain(tile_at, gl=gl),
        first_token_of=plain(first_token_of, gl=gl),
        iterations_of=plain(iterations_of, part_of=plain(part_of)),
        advance=plain(advance, gl=gl),
    )(copies, lambda copies, full, stage, channel_tile, k, C: log.append(("w", full, stage, channel_tile, k)), C)
    return log


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("of_tokens", "of_channels", "iterations", "splits", "per_iteration", "stages_ahead"),
    [(1, 1, 9, 1, 1, 6), (3, 5, 7, 1, 2, 2), (2, 3, 5, 3, 2, 6), (1, 2, 1, 1, 1, 6)],
)
def test_every_stage_of_every_tile_once(of_tokens, of_channels, iterations, splits, per_iteration, stages_ahead, paired):
    C = SimpleNamespace(
        stages=6, stages_ahead=stages_ahead, stage_bytes=4096, iteration_stages=per_iteration, splits=splits, token_group=2,
        tile_tokens=32, x_block=(32, 64), x_pieces=1, x_row_bytes=128, paired=paired, last_is_full=True, stream_k=False,
    )  # fmt: skip
    tiles, blocks = SimpleNamespace(of_tokens=of_tokens, of_channels=of_channels, iterations=iterations), 4
    tiles.tokens = max(20, of_tokens * 32 - 5)  # one tile is not full, the last of several begins where it is
    for block in range(blocks):
        log = asked_for(block, blocks, tiles, C)
        of_tiles = []
        for index in range(block, of_tokens * of_channels * splits, blocks):
            token_tile, channel_tile, split = plain(tile_at, gl=GL)(index, tiles, C)
            begin, end = plain(iterations_of, part_of=plain(part_of))(split, tiles, C)
            token = min(token_tile * 32, max(tiles.tokens - 32, 0))
            of_tiles.append([(channel_tile, token, k) for k in range(begin * per_iteration, end * per_iteration)])
        wanted = [stage for tile in of_tiles for stage in tile]
        w, x = ([entry for entry in log if entry[0] == name] for name in "wx")
        places = [(i % 6, i % 6) for i in range(len(wanted))]
        assert w == [("w", *place, channel, k) for place, (channel, _, k) in zip(places, wanted, strict=True)]
        assert x == [("x", *place, token, k * 64) for place, (_, token, k) in zip(places, wanted, strict=True)]

        # As many weights as may be are ahead of the kernel before, into stages that nobody has used; all else comes after it.
        await_at, ahead = log.index(("await_previous",)), min(stages_ahead, len(of_tiles[0]) if of_tiles else 0)
        assert [entry[0] for entry in log[:await_at]] == ["say_ready"] * paired + ["start_next"] + ["expect", "w"] * ahead
        assert [entry[1:] for entry in log if entry[0] == "expect"] == [(i, 0) for i in range(ahead)]
        # The other stages are waited for, each with the parity of the lap before.
        assert [entry[1:] for entry in log if entry[0] == "acquire"] == [
            (i % 6, 1 - i // 6 % 2, 0) for i in range(ahead, len(wanted))
        ]


@pytest.mark.parametrize(("tokens", "pieces"), [(1, 1), (8, 1), (9, 2), (20, 3), (31, 4)])
def test_pieces_without_a_token_are_not_asked_for(tokens, pieces):
    C = SimpleNamespace(
        stages=6, stages_ahead=6, stage_bytes=8192, iteration_stages=1, splits=1, token_group=2, tile_tokens=32,
        x_block=(8, 64), x_pieces=4, x_row_bytes=128, paired=False, last_is_full=True, stream_k=False,
    )  # fmt: skip
    tiles = SimpleNamespace(of_tokens=1, of_channels=3, iterations=7, tokens=tokens)
    log = asked_for(0, 2, tiles, C)
    wanted = [(i % 6, 8 * piece, i % 7 * 64) for i in range(14) for piece in range(pieces)]
    assert [(stage, token, k) for name, _, stage, token, k in (e for e in log if e[0] == "x")] == wanted
    absent = {entry[-1] for entry in log if entry[0] in ("expect", "acquire")}
    assert absent == {(4 - pieces) * 8 * 128}
