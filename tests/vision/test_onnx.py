"""ONNX in and out: files as torch exports them, written networks against the reference evaluator of onnx, QDQ nodes as scales,
and nodes that are refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
import torch.utils._pytree as pytree
from torch import nn

from lowbit import vision
from lowbit.vision.graph import Conv
from tests.vision.nets import Fcn, Plain, SsdLite, Yolo, mobilenet, regnet, resnet, seasoned

onnx = pytest.importorskip("onnx", reason="ONNX files are read by the onnx package")
helper, numpy_helper, TensorProto = onnx.helper, onnx.numpy_helper, onnx.TensorProto
reference = pytest.importorskip("onnx.reference")

NETWORKS = {
    "resnet": lambda: resnet(depths=(2, 1)), "mobilenet-v2": lambda: mobilenet(2), "mobilenet-v3": lambda: mobilenet(3),
    "efficientnet": lambda: mobilenet("efficient"), "regnet": regnet, "ssd-lite": lambda: seasoned(SsdLite()),
    "yolo": lambda: seasoned(Yolo()), "fcn": lambda: seasoned(Fcn()), "plain": lambda: seasoned(Plain()),
}  # fmt: skip


def images_for(name, count=6):
    torch.manual_seed(0)
    return torch.randn(count, 3, *((16, 16) if name == "plain" else (32, 32)))


def relative(got, wanted):
    """The relative error of each result."""
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True)
    return [float((torch.as_tensor(a) - b).norm() / b.norm()) for a, b in pairs]


@pytest.mark.parametrize(
    ("name", "scheme"), [(name, "w8a8") for name in NETWORKS] + [(n, "w4a4") for n in ("resnet", "ssd-lite", "fcn")]
)
def test_written_networks_compute_the_same(tmp_path, name, scheme):
    """The reference evaluator has the network's results but for codes at ties, and reading the file gives the same integers."""
    images = images_for(name)
    network = vision.quantize(NETWORKS[name](), images, scheme)
    vision.write_onnx(network, tmp_path / "net.onnx")
    wanted = network(images)
    got = reference.ReferenceEvaluator(str(tmp_path / "net.onnx")).run(None, {"images": images.numpy()})
    assert max(relative(got, wanted)) < 5e-3  # a code of few, whose value lies between two
    again = vision.read_onnx(tmp_path / "net.onnx").quantized()
    weights = zip(again.program.weights, network.program.weights, strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    scales = {value.scale for value in network.program.values.values()}
    assert {value.scale for value in again.program.values.values()} <= {float(np.float32(scale)) for scale in scales} | {1.0}
    assert max(relative(again(images), wanted)) < 1e-5 and again.scheme == scheme and again.kept == {}
    model = onnx.load(tmp_path / "net.onnx")
    kinds = {tensor.data_type for tensor in model.graph.initializer}
    assert (TensorProto.INT4 in kinds) == (TensorProto.UINT4 in kinds) == (scheme == "w4a4") and TensorProto.INT8 in kinds


def test_results_have_names(tmp_path):
    images = images_for("fcn")
    for make, names in ((Fcn, ["out", "aux.0"]), (Yolo, ["0", "1"]), (SsdLite, ["scores", "boxes"])):
        network = vision.quantize(seasoned(make()), images, "w8a8")
        vision.write_onnx(network, tmp_path / "net.onnx")
        assert [value.name for value in onnx.load(tmp_path / "net.onnx").graph.output] == names
        assert list(vision.read_onnx(tmp_path / "net.onnx")(images)) == names


@pytest.mark.parametrize("name", ["mobilenet-v3", "ssd-lite", "yolo"])
def test_files_that_torch_exports(tmp_path, name):
    pytest.importorskip("onnxscript", reason="torch exports ONNX by onnxscript")
    model, images = NETWORKS[name](), images_for(name)
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    torch.onnx.export(
        model, (images[:2],), tmp_path / "net.onnx", dynamo=True, dynamic_shapes=shapes, opset_version=18, verbose=False
    )
    network = vision.read_onnx(tmp_path / "net.onnx")
    with torch.no_grad():
        assert max(relative(network(images), model(images))) < 1e-5
    quantized, direct = (vision.quantize(each, images, "w8a8") for each in (network, model))
    assert max(relative(quantized(images), direct(images))) < 5e-3 and quantized.kept == {}


def written(path, nodes, outputs=("y",), opset=17, size=("N", 3, 8, 8), **constants):
    """Writes a file with input x and these nodes and constants, and returns its path."""
    named = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(
        nodes, "test", [helper.make_tensor_value_info("x", TensorProto.FLOAT, size)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs], named,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9), path)
    return path


def node(kind, inputs, output="y", **attributes):
    return helper.make_node(kind, inputs.split(" "), [output], name=f"{kind.lower()} of {output}", **attributes)


def every_operator(path, opset):
    """A file with every operator that is read, in a shape that torch's exporter does not produce."""
    rng = np.random.default_rng(0)

    def w(*shape):
        return (rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    newer = opset >= 18
    ints = {name: np.array(value, np.int64) for name, value in {
        "sides": [0, 0, 1, 0, 0, 0, 1, 2], "axes": [2, 3], "tail": [0, -1], "last": [2, 3]}.items()}  # fmt: skip
    nodes = [
        node("Pad", "x sides", "p"),
        node("Conv", "p w1 b1", "a", kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER"),
        node("BatchNormalization", "a g h m v", "n"), node("Clip", "n low high", "c"),
        node("Conv", "c w2", "d", kernel_shape=[3, 3], pads=[0, 1, 1, 0], group=8),
        node("HardSigmoid", "d", "hs", alpha=1 / 6), node("Mul", "hs d", "hw"), node("Sigmoid", "hw", "s"),
        node("Mul", "hw s", "e"),
        node("MaxPool", "e", "mp", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("AveragePool", "e", "ap", kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 1]),
        node("Add", "mp ap", "q"), node("Relu", "q", "r"), node("Concat", "r e", "k", axis=-3),
        node("Resize", "k  factors", "up", mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        node("Resize", "up   sizes", "bi", mode="linear", coordinate_transformation_mode="half_pixel"),
        node("Conv", "bi w3", "t", kernel_shape=[1, 1]), node("HardSwish", "t", "u"), node("LeakyRelu", "u", "l", alpha=0.1),
        node("GlobalAveragePool", "l", "ga"), node("Shape", "ga", "shape"), node("Gather", "shape zero", "batch"),
        node("Unsqueeze", "batch at", "batch1"), node("Concat", "batch1 minus", "wanted", axis=0),
        node("Reshape", "ga wanted", "f"), node("Gemm", "f w4 b4", "z", transB=1), node("Tanh", "z", "th"),
        node("MatMul", "th w5", "mm"), node("Add", "mm b5", "y"),
        node("ReduceMean", "l axes", "rm", keepdims=0) if newer else node("ReduceMean", "l", "rm", axes=[2, 3], keepdims=0),
        node("Softmax", "rm", "y2", axis=1), node("Transpose", "t", "tr", perm=[0, 2, 3, 1]), node("Flatten", "tr", "y3"),
        node("Squeeze", "ga last", "sq"), node("Identity", "sq", "y4"),
    ]  # fmt: skip
    ints |= {"zero": np.array(0), "at": np.array([0]), "minus": np.array([-1]), "sizes": np.array([2, 16, 13, 9])}
    return written(
        path, nodes, ("y", "y2", "y3", "y4"), opset, w1=w(8, 3, 3, 3), b1=w(8), g=1 + w(8), h=w(8), m=w(8),
        v=np.abs(w(8)) + 0.5,
        low=np.float32(0), high=np.float32(6), w2=w(8, 1, 3, 3), factors=np.array([1, 1, 2, 2], np.float32), w3=w(12, 16, 1, 1),
        w4=w(7, 12), b4=w(7), w5=w(7, 5), b5=w(5), **ints,
    )  # fmt: skip


@pytest.mark.parametrize("opset", [17, 18, 21])
def test_every_operator_computes_what_the_evaluator_does(tmp_path, opset):
    path = every_operator(tmp_path / "net.onnx", opset)
    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8)
    wanted = reference.ReferenceEvaluator(str(path)).run(None, {"x": images.numpy()})
    network = vision.read_onnx(path)
    got = network(images)
    assert list(got) == ["y", "y2", "y3", "y4"] and network.image_shape == (3, 8, 8)
    for a, b in zip(got.values(), wanted, strict=True):
        torch.testing.assert_close(a, torch.tensor(b), rtol=1e-4, atol=1e-5)
    assert {name: tuple(value.shape) for name, value in network(torch.randn(5, 3, 8, 8)).items()}["y"] == (5, 5)
    graph = vision.trace(network, images)
    assert next(n.relu_max for n in graph.nodes.values() if isinstance(n, Conv)) == 6.0


def quantized_file(path, kind=np.int8, zero=0, opset=21, extra=()):
    """A convolution with a ReLU and an average, with QDQ nodes of int8, or of `kind` after the ReLU; and the weights' codes."""
    torch.manual_seed(0)
    codes, step = torch.randint(-100, 100, (4, 3, 3, 3)).numpy().astype(np.int8), np.full(4, 0.01, np.float32)
    nodes = [
        node("QuantizeLinear", "x xs z8", "xq"), node("DequantizeLinear", "xq xs z8", "xd"),
        node("DequantizeLinear", "w ws wz", "wd", axis=0), node("Conv", "xd wd b", "c", kernel_shape=[3, 3]),
        node("Relu", "c", "r"), node("QuantizeLinear", "r rs zero", "rq"), node("DequantizeLinear", "rq rs zero", "rd"), *extra,
        node("GlobalAveragePool", "rd", "g"), node("Flatten", "g", "y"),
    ]  # fmt: skip
    return written(
        path, nodes, ("y",), opset, w=codes, ws=step, wz=np.zeros(4, np.int8), b=np.float32([0.5, -0.2, 0, 1]),
        xs=np.float32(0.03), z8=np.int8(0), rs=np.float32(0.02), zero=kind(zero),
    ), codes  # fmt: skip


def test_nodes_of_a_quantized_file_become_scales(tmp_path):
    path, codes = quantized_file(tmp_path / "net.onnx")
    images = torch.randn(4, 3, 8, 8)
    network = vision.read_onnx(path).quantized()
    assert torch.equal(network.program.layers[0].weight, torch.tensor(codes))
    wanted = reference.ReferenceEvaluator(str(path)).run(None, {"x": images.numpy()})
    torch.testing.assert_close(network(images), torch.tensor(wanted[0]), rtol=0, atol=2 * 0.02 / 36)
    half, _ = quantized_file(tmp_path / "half.onnx", np.uint8)
    scales = {name: value.scale for name, value in vision.read_onnx(half).quantized().program.values.items()}
    assert scales["conv of c"] == pytest.approx(0.02 * 255 / 127)
    middle, _ = quantized_file(tmp_path / "middle.onnx", np.uint8, 128, opset=17)
    assert torch.equal(vision.read_onnx(middle).quantized()(images), network(images))


def test_values_without_nodes_get_a_scale_that_clips_nothing(tmp_path):
    """As onnxruntime writes them: no nodes after the last activation, and after the flattened mean."""
    path, _ = quantized_file(tmp_path / "net.onnx")
    model = onnx.load(path)
    del model.graph.node[4:]  # the ReLU and all after it
    for each in (
        node("QuantizeLinear", "c rs z8", "cq"), node("DequantizeLinear", "cq rs z8", "cd"), node("HardSwish", "cd", "h"),
        node("GlobalAveragePool", "h", "g"), node("Flatten", "g", "f"),
        node("QuantizeLinear", "f fs z8", "fq"), node("DequantizeLinear", "fq fs z8", "fd"),
        node("DequantizeLinear", "w4 ws wz", "w4d", axis=0), node("Gemm", "fd w4d b", "y", transB=1),
    ):  # fmt: skip
        model.graph.node.append(each)
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.015), "fs"))
    model.graph.initializer.append(numpy_helper.from_array(np.int8(np.arange(-8, 8).reshape(4, 4) * 9), "w4"))
    onnx.save(model, path)
    images = torch.randn(4, 3, 8, 8)
    network = vision.read_onnx(path).quantized()
    wanted = torch.tensor(reference.ReferenceEvaluator(str(path)).run(None, {"x": images.numpy()})[0])
    assert network.kept == {} and max(relative(network(images), wanted)) < 0.02
    assert any(value.scale == pytest.approx(0.015) for value in network.program.values.values())


def test_quantized_files_that_have_no_integer_form_here(tmp_path):
    path, _ = quantized_file(tmp_path / "net.onnx", np.uint8, 7)
    with pytest.raises(
        vision.OnnxError, match=r"'quantizelinear of rq' \(QuantizeLinear\): uint8 with zero point 7: supported are"
    ):
        vision.read_onnx(path).quantized()
    more = (node("QuantizeLinear", "rd ws0 zero", "rq2"), node("DequantizeLinear", "rq2 ws0 zero", "rd2"))
    path, _ = quantized_file(tmp_path / "two.onnx", extra=more)
    model = onnx.load(path)
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "ws0"))
    onnx.save(model, path)
    with pytest.raises(vision.OnnxError, match="has two scales, 0.02 and 0.5"):
        vision.read_onnx(path).quantized()
    plain = written(tmp_path / "plain.onnx", [node("Conv", "x w", kernel_shape=[1, 1])], w=np.ones((4, 3, 1, 1), np.float32))
    with pytest.raises(vision.OnnxError, match="'?conv of y'?: its weights have no DequantizeLinear"):
        vision.read_onnx(plain).quantized()
    open_size = written(tmp_path / "open.onnx", [node("Relu", "x")], size=("N", 3, "H", "W"))
    with pytest.raises(vision.OnnxError, match="the file leaves the size of images open"):
        vision.read_onnx(open_size).quantized()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (node("Einsum", "x", equation="nchw->nc"), r"node 'einsum of y' \(Einsum\): it has no form here; supported are Add"),
        (node("Transpose", "x", perm=[1, 0, 2, 3]), "the batch stays the first dimension, got"),
        (node("Concat", "x x", axis=0), "along another axis than the batch"),
        (node("Resize", "x  f", mode="cubic"), "linear with half_pixel or align_corners is supported, got cubic"),
        (node("Resize", "x  f", mode="nearest", coordinate_transformation_mode="align_corners"), "nearest pixels are asym"),
        (node("HardSigmoid", "x"), "alpha is 1 / 6 and beta 0.5, got 0.2"),
        (node("MaxPool", "x", kernel_shape=[3, 3], pads=[0, 0, 1, 1]), "padding is the same on both sides"),
        (node("Conv", "x x", kernel_shape=[1, 1]), "weights are constants"),
        (node("Flatten", "x", axis=2), "axis is 1"),
        (helper.make_node("FusedConv", ["x"], ["y"], name="fused", domain="com.microsoft"), "its domain is com.microsoft"),
    ],
)  # fmt: skip
def test_nodes_are_refused_by_name(tmp_path, given, words):
    path = written(tmp_path / "net.onnx", [given], f=np.array([1, 1, 2, 2], np.float32))
    with pytest.raises(vision.OnnxError, match=words):
        vision.read_onnx(path)(torch.randn(2, 3, 8, 8))
    with pytest.raises(vision.UnsupportedNetwork, match=words):
        vision.quantize(vision.read_onnx(path), torch.randn(2, 3, 8, 8))


def test_files_that_are_no_networks(tmp_path):
    (tmp_path / "text.onnx").write_text("no network")
    with pytest.raises(vision.OnnxError, match="not an ONNX file"):
        vision.read_onnx(tmp_path / "text.onnx")
    with pytest.raises(FileNotFoundError, match="no such file"):
        vision.read_onnx(tmp_path / "none.onnx")
    with pytest.raises(vision.OnnxError, match="opset 16, 17 and newer are supported"):
        vision.read_onnx(written(tmp_path / "old.onnx", [node("Relu", "x")], opset=16))
    network = vision.read_onnx(written(tmp_path / "net.onnx", [node("Relu", "x")]))
    with pytest.raises(vision.OnnxError, match=r"takes images \[N, 3, 8, 8\]"):
        network(torch.randn(1, 3, 9, 8))


def test_what_has_no_onnx_form_is_not_written(tmp_path):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)

        def forward(self, x):
            return functional.softmax(self.norm(self.conv(x)).flatten(1), 1)

    network = vision.quantize(Normed(), torch.randn(4, 3, 8, 8), "w8a8")
    with pytest.raises(vision.OnnxError, match="group_norm.default with these arguments has no ONNX form here"):
        vision.write_onnx(network, tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []
