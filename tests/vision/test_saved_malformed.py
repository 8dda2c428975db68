"""Damaged saved networks give a clean error or the same result. If the checksum is updated to match the damage, they give a
clean error or run.
"""

from __future__ import annotations

import copy
import json
import math
import random
import shutil

import pytest
import torch
import torch.utils._pytree as pytree
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lowbit import vision
from lowbit.checkpoint import CheckpointError
from lowbit.vision import saved
from tests.vision.nets import Fcn, Mixed, Sums, Yolo, mobilenet, resnet, seasoned

DAMAGES = 600
EXTREME = [
    None, True, False, 0, 1, -1, 2, 7, 1.5, -0.25, 0.0, 1e-320, 1e30, math.inf, -math.inf, math.nan, 1 << 24, 1 << 31, 10**12,
    10**30, "", "x", "s8", "f32", "u4", [], {}, [0, 0], [[1]], {"value": "nowhere"}, {"tensor": "nowhere"}, [1] * 1000,
]  # fmt: skip


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """[(folder, images, result)] of saved networks that cover every kind of operation."""
    torch.manual_seed(0)
    made, images = [], torch.randn(4, 3, 32, 32)
    pixels = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    of_pixels = vision.Pixels((0.4, 0.5, 0.6), (0.2, 0.2, 0.3))
    small = images[:, :, :16, :16]
    for name, model, x, options in (
        ("mixed", seasoned(Mixed()), small, {"scheme": "w8a8"}),
        ("sums", Sums(), images[:, :, :9, :7], {"scheme": "w8a4"}),
        ("resnet", resnet("bottleneck", sizes=(16, 32)), pixels, {"scheme": "w4a4", "pixels": of_pixels}),
        ("mobilenet", mobilenet(3), small, {"scheme": "w8a8"}),
        ("yolo", seasoned(Yolo(torch.nn.ReLU)), images, {"scheme": "w4a4"}),
        ("fcn", seasoned(Fcn()), small, {"scheme": "w8a8"}),
    ):
        network = vision.quantize(model, x, **options)
        folder = tmp_path_factory.mktemp("networks") / name
        vision.save(network, folder)
        made.append((folder, x, network(x)))
    return made


def damaged_bytes(folder, rng):
    path = rng.choice([folder / "config.json", folder / "model.safetensors"])
    data = bytearray(path.read_bytes())
    at = rng.randrange(min(len(data), rng.choice([16, 4000, len(data)])))
    how = rng.choice(["bit", "cut", "insert", "zero", "move"])
    if how == "bit":
        data[at] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del data[at:]
    elif how == "insert":
        data[at:at] = rng.randbytes(rng.choice([1, 100]))
    elif how == "zero":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    else:
        data[at : at + 8] = data[-8:]
    path.write_bytes(bytes(data))
    return how, path.name, at


def _places(value, path=()):
    """(container, key, path) of every entry in a description."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key, (*path, key)
        yield from _places(inner, (*path, key))


def damaged_description(folder, rng):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    places = list(_places(config))
    holder, key, where = rng.choice(places)
    how = rng.choice(["set", "set", "set", "delete", "nudge", "swap", "copy"])
    if how == "delete":
        del holder[key]
    elif how == "nudge" and isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
        holder[key] = rng.choice([-holder[key], holder[key] + 1, holder[key] * 2, holder[key] * 1e9, float(holder[key])])
    elif how == "swap":
        other, other_key, _ = rng.choice(places)
        holder[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(holder[key])
    elif how == "copy" and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    else:
        holder[key] = copy.deepcopy(rng.choice(EXTREME))
    path.write_text(json.dumps(config))
    return how, where


def damaged_tensors(folder, rng):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name, other = rng.choice(list(tensors)), rng.choice(list(tensors))
    how = rng.choice(["swap", "delete", "add", "nan", "inf", "negative", "type", "shape", "value", "wide"])
    t = tensors[name].clone()
    if how == "swap":
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif how == "delete":
        del tensors[name]
    elif how == "add":
        tensors["more"] = t
    elif how in ("nan", "inf", "negative") and t.is_floating_point():
        t.view(-1)[-1] = {"nan": math.nan, "inf": math.inf, "negative": -1.0}[how]
        tensors[name] = t
    elif how == "type":
        tensors[name] = t.to(rng.choice([torch.float16, torch.int8, torch.uint8, torch.float64, torch.bool]))
    elif how == "shape":
        tensors[name] = rng.choice([t.flatten(), t[None], t[:-1], t.flatten()[:0]]).contiguous()
    elif how == "wide":
        tensors[name] = torch.cat([t.flatten(), t.flatten()])
    elif t.numel():
        t.view(-1)[rng.randrange(t.numel())] += 1
        tensors[name] = t
    save_file(tensors, path)
    return how, name


def with_checksum(folder):
    """Updates the checksum to match the folder's contents, if the description is readable."""
    try:
        config = json.loads((folder / "config.json").read_text())
        config["sha256"] = saved._sha256(config, load_file(folder / "model.safetensors"))
        (folder / "config.json").write_text(json.dumps(config))
    except (ValueError, TypeError, AttributeError, OSError, SafetensorError):  # the description is not readable
        return


@pytest.mark.parametrize("fitting", [False, True], ids=["as damaged", "with a checksum that fits"])
def test_damage(networks, tmp_path, fitting):
    rng, loaded, refused = random.Random(0), 0, 0
    for _ in range(DAMAGES):
        source, images, result = rng.choice(networks)
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        what = rng.choice([damaged_bytes, damaged_description, damaged_description, damaged_tensors])(folder, rng)
        if fitting:
            with_checksum(folder)
        try:
            network = vision.load(folder)
        except CheckpointError as error:
            assert "\n" not in str(error) and "damaged" in str(error) and len(str(error)) < 1000, what
            refused += 1
            continue
        loaded += 1
        if not fitting:
            got, wanted = (pytree.tree_leaves(value) for value in (network(images), result))
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), what
        elif images.dtype != torch.uint8 or network.program.pixels is not None:
            small = network.program.values[network.program.images].shape == images.shape[1:]
            assert not small or all(len(value) == len(images) for value in pytree.tree_leaves(network(images))), what
        assert network.lines()
    assert loaded > 3 and refused > 100


def spoiled(folder, change):
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with_checksum(folder)


def of_kind(config, kind, **more):
    return next(op for op in config["operations"] if op["kind"] == kind and all(op[k] == v for k, v in more.items()))


@pytest.mark.parametrize(
    ("which", "change", "words"),
    [
        (0, lambda c, t: c["values"].update(x=["f32", [1 << 20, 1 << 20], 1.0]), "has a shape of at most 67,108,864"),
        (0, lambda c, t: next(iter(c["values"].values())).__setitem__(2, math.nan), "is a positive number, not nan"),
        (0, lambda c, t: next(iter(c["values"].values())).__setitem__(2, -1.0), "is a positive number, not -1.0"),
        (0, lambda c, t: of_kind(c, "quantize").update(factor=math.inf), "its factor is a positive number, not inf"),
        (0, lambda c, t: of_kind(c, "quantize").update(factor=3.0), "is not 1 / "),
        (0, lambda c, t: of_kind(c, "convolve")["layer"].update(stride=[0, 1]), "strides are 1 or more"),
        (0, lambda c, t: of_kind(c, "convolve")["layer"].update(stride=[2, 2]), "the program states"),
        (0, lambda c, t: of_kind(c, "convolve")["layer"].update(padding=[1 << 20, 1 << 20]), "the program states"),
        (0, lambda c, t: of_kind(c, "compute", target="conv2d.default")["args"].__setitem__(6, 0), "deep:float: "),
        (0, lambda c, t: of_kind(c, "compute")["args"].__setitem__(0, 5), ": "),
        (0, lambda c, t: t["op1.s"].__setitem__(0, math.nan), "s has numbers that are negative or not finite"),
        (0, lambda c, t: t["op1.s"].__setitem__(0, -1.0), "s has numbers that are negative or not finite"),
        (0, lambda c, t: t["op1.b"].__setitem__(0, math.inf), "b has numbers that are not finite"),
        (0, lambda c, t: t.update(more=torch.zeros(1)), "nothing reads the tensor more"),
        (0, lambda c, t: t.pop("op1.s"), "operation 1: 'op1.s' is missing"),
        (0, lambda c, t: t.update({"op1.weight": t["op1.weight"].float()}), "op1.weight is torch.int8"),
        (1, lambda c, t: of_kind(c, "sum")["layer"].update(s=-0.5), "s is a positive number, not -0.5"),
        (1, lambda c, t: of_kind(c, "max_pool").update(padding=[2, 2]), "its padding is at most half its kernel"),
        (1, lambda c, t: of_kind(c, "average_pool").update(scale=0.5), "it reads codes, and has their scale"),
        (2, lambda c, t: c["pixels"][1].__setitem__(0, math.nan), "finite numbers"),
        (2, lambda c, t: of_kind(c, "average_pool").update(y=of_kind(c, "max_pool")["y"]), "is made twice"),
        (2, lambda c, t: c.update(scheme="w3a3"), "w8a8, w8a4, w4a8 or w4a4"),
        (3, lambda c, t: of_kind(c, "gate")["layer"].update(s=-1.0), "s is a positive number, not -1.0"),
        (3, lambda c, t: of_kind(c, "gate").update(gate=of_kind(c, "gate")["x"]), "its gate is [32, 1, 1], not [32, "),
        (3, lambda c, t: t.update({"op2.table": t["op2.table"][1:]}), "its table is int8 [256], not torch.int8 [255]"),
        (4, lambda c, t: of_kind(c, "concat")["layers"].pop(), "layers are for 2 parts"),
        (4, lambda c, t: of_kind(c, "concat")["layers"][0].update(s=-1.0), "s is a positive number, not -1.0"),
        (4, lambda c, t: of_kind(c, "concat")["parts"].append("nowhere"), "nothing before it makes"),
        (4, lambda c, t: of_kind(c, "resize").update(size=[7, 9]), "repeated a whole number of times"),
        (4, lambda c, t: c.update(form=[0, 2]), "results are numbered 0 to 1, got 2"),
        (4, lambda c, t: c.update(results=[], form=[]), "it has no result"),
        (5, lambda c, t: of_kind(c, "resize").update(mode="cubic"), "images are resized by nearest or bilinear, not by cubic"),
        (5, lambda c, t: of_kind(c, "resize").update(size=[9, 9]), "the program states"),
        (3, lambda c, t: of_kind(c, "map").update(function="sin"), "functions are silu, hardswish, "),
        (3, lambda c, t: c["operations"][5]["layer"].update(groups=8), "weights [32, 1, 3, 3] meet [32, "),
        (3, lambda c, t: c["operations"][5]["layer"].update(groups=True), "a number of groups that divides them, got True"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(networks, tmp_path, which, change, words):
    shutil.copytree(networks[which][0], tmp_path / "net")
    spoiled(tmp_path / "net", change)
    with pytest.raises(CheckpointError) as caught:
        vision.load(tmp_path / "net")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_changed_byte_of_a_weight_is_seen(networks, tmp_path):
    shutil.copytree(networks[2][0], tmp_path / "net")
    path = tmp_path / "net" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"SHA-256 is [0-9a-f]{64}, config.json states .* changed since it was saved"):
        vision.load(tmp_path / "net")


def test_networks_saved_before_checksums_load(networks, tmp_path):
    folder, images, result = networks[0]
    shutil.copytree(folder, tmp_path / "net")
    config = json.loads((tmp_path / "net" / "config.json").read_text())
    del config["sha256"]
    (tmp_path / "net" / "config.json").write_text(json.dumps(config))
    assert torch.equal(vision.load(tmp_path / "net")(images), result)
