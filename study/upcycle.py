"""`python -m study upcycle OUT`: turns a small dense model into a mixture of experts with trained weights.

No package ships a mixture of experts, so experts, routers and quantization are tried on this one: Mixtral's architecture, made
of SmolLM2-135M. Each MLP becomes `experts` MLPs of fewer channels, of which `top_k` compute a token:

    tokens are clustered by the channels of the MLP that they use         (`cluster`)
    a router learns the cluster of a token from the input of the MLP      (`fit_router`)
    an expert keeps the channels that its tokens use most, and its down projection is fitted to the dense output (`fit_expert`)
    routers and experts are trained to predict what the dense model does  (`distill`)

Channels may be in several experts. All tokens come from the first half of each text; perplexity is measured on the second.
Source of the idea: MoEfication (arXiv:2110.01786) splits an MLP by its active channels, LLaMA-MoE (arXiv:2406.16554) one with
SwiGLU; here experts overlap, since channels behind SiLU are rarely zero.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM, PretrainedConfig, PreTrainedModel

from lowbit.checkpoint import CheckpointReader
from lowbit.checkpoint.target import locked_scratch
from lowbit.cli.terminal import say, user_errors
from lowbit.demo import download_model
from lowbit.eval import perplexity
from lowbit.eval.results import machine, versions, write_json
from lowbit.models.decoder import LayerwiseDecoder
from lowbit.models.load import load_causal
from lowbit.models.skeleton import tokenizer_of
from lowbit.progress import Progress
from lowbit.sources import model_folder
from study.data import gather
from study.run import halves

RESULT = "lowbit study upcycle"
RECORD = "upcycle.json"
"""File in the model's folder with the recipe and what came out."""
RIDGE = 0.5
"""Weight that ties a fitted down projection to the dense one, relative to a mean expert's sum of squared activations. At 8,192
tokens 0.4 to 2 are best on other tokens."""
ROUTER_STEPS, ROUTER_DECAY = 60, 1e-3
CLUSTER_STEPS = 20
GRADIENT_NORM = 1.0

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@dataclass(frozen=True)
class Recipe:
    """How a mixture is made; with the source and the texts it determines the result on one machine.

    channels: of an expert; 0 for half of the dense MLP's. samples: pieces of `length` tokens that experts are fitted on.
    steps: of training, each on `batch` pieces. balance: weight of the loss that evens out the experts' tokens.
    """

    experts: int = 8
    top_k: int = 2
    channels: int = 0
    samples: int = 128
    length: int = 512
    steps: int = 600
    batch: int = 16
    learning_rate: float = 2e-4
    balance: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"a token is computed by 1 to all of the experts, got {self.top_k} of {self.experts}")
        for name, least in (("channels", 0), ("samples", 1), ("length", 2), ("steps", 0), ("batch", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is at least {least}, got {getattr(self, name)}")


@app.command()
@user_errors
def main(
    out: Annotated[Path, typer.Argument(help="New folder for the mixture.")],
    source: Annotated[Path | None, typer.Option(help="Folder of a 16-bit Llama model; by default the demo's.")] = None,
    data: Annotated[Path, typer.Option(help="Texts (*.txt); filled when it does not exist.")] = Path("study-data"),
    experts: Annotated[int, typer.Option(min=2, help="Experts of a layer.")] = Recipe.experts,
    top_k: Annotated[int, typer.Option(min=1, help="Experts that compute a token.")] = Recipe.top_k,
    channels: Annotated[int, typer.Option(min=0, help="Channels of an expert; 0: half of the dense MLP's.")] = 0,
    samples: Annotated[int, typer.Option(min=1, help="Pieces to fit the experts on.")] = Recipe.samples,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a piece.")] = Recipe.length,
    steps: Annotated[int, typer.Option(min=0, help="Steps of training.")] = Recipe.steps,
    batch: Annotated[int, typer.Option(min=1, help="Pieces in a step.")] = Recipe.batch,
    learning_rate: Annotated[float, typer.Option(help="Largest learning rate.")] = Recipe.learning_rate,
    seed: Annotated[int, typer.Option(help="Determines the result.")] = Recipe.seed,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window that perplexity is measured on.")] = 1024,
    windows: Annotated[int, typer.Option(min=1, help="Windows of each text.")] = 8,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")] = "cpu",
) -> None:
    """Makes a mixture of experts of SmolLM2-135M, in the folder OUT, and measures it against the dense model.

    Example: python -m study upcycle smollm2-8x --device cuda

    Example: python -m study upcycle smollm2-8x --samples 16 --steps 10 --batch 1 --windows 2    (minutes on a CPU)
    """
    if out.exists():
        raise ValueError(f"{out}: exists; name a new folder for the mixture")
    recipe = Recipe(
        experts=experts, top_k=top_k, channels=channels, samples=samples, length=length, steps=steps, batch=batch,
        learning_rate=learning_rate, seed=seed,
    )  # fmt: skip
    folder = download_model(say) if source is None else model_folder(source)
    if not data.exists():
        gather(data, say)
    upcycle(folder, read_texts(data), out, recipe, window=window, windows=windows, device=device, say=say, progress=True)
    say(f"wrote {out}")


def read_texts(folder: Path) -> dict[str, str]:
    """Returns the texts of a folder by name, sorted. Raises ValueError if there is none."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}
    if not texts:
        raise ValueError(f"{folder}: has no text (*.txt); name a folder that does not exist, and it is filled with texts")
    return texts


def upcycle(
    source: Path,
    texts: Mapping[str, str],
    out: Path,
    recipe: Recipe,
    *,
    window: int = 1024,
    windows: int = 8,
    device: str = "cpu",
    say: Callable[[str], None] = lambda line: None,
    progress: bool = False,
) -> dict[str, Any]:
    """Writes a mixture made of the dense Llama model in `source` to the new folder `out`, in bfloat16, with its record.

    texts: by name; first halves are trained on, `windows` windows of the second halves measured on. Returns the record: recipe,
    perplexity of the dense model, of the fitted and of the trained mixture by text, and the loss by step. The same machine,
    threads and arguments give the same weights. Raises ValueError for other architectures and for texts that are too short.
    """
    dense = load_causal(source, device=device, dtype=torch.float32).eval().requires_grad_(False)
    config = mixture_config(dense.config, recipe)
    tokenizer = tokenizer_of(source, dense)
    parts = {name: halves(text) for name, text in texts.items()}
    ids = {name: [_tokens(tokenizer, half) for half in both] for name, both in parts.items()}
    seen = torch.cat([first for first, _ in ids.values()])
    measured = {name: second[: window * windows] for name, (_, second) in ids.items()}

    def measure(what: str, model: PreTrainedModel) -> dict[str, float]:
        values = {name: perplexity(model, own, window=window, progress=progress).perplexity for name, own in measured.items()}
        say(f"perplexity, {what}: " + ", ".join(f"{name} {value:.2f}" for name, value in values.items()))
        return values

    say(f"{len(seen):,} tokens to train on, of {', '.join(texts)}")
    record: dict[str, Any] = {
        "result": RESULT, "machine": machine(), "versions": versions(("transformers",)), "source": source.name,
        "recipe": asdict(recipe), "device": device, "train_tokens": len(seen), "window": window, "windows": windows,
        "perplexity": {"dense": measure("dense", dense)},
    }  # fmt: skip
    layers = fit_layers(source, seen, config, recipe, device, progress)
    mixture = build_mixture(dense, config, layers).to(device)
    record["perplexity"]["fitted"] = measure("experts fitted", mixture)
    if recipe.steps:
        record["loss"] = distill(mixture, dense, seen, recipe, progress)
    for parameter in mixture.parameters():  # not the buffers: the angles of positions stay in float32
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    record["perplexity"]["mixture"] = measure("mixture, as written", mixture)
    with locked_scratch(out, say) as work:
        mixture.to(torch.bfloat16).save_pretrained(work / "model")
        tokenizer.save_pretrained(work / "model")
        (work / "model" / "README.md").write_text(_card(source, config, record))
        write_json(work / "model" / RECORD, record)
        os.replace(work / "model", out)
    return record


def _tokens(tokenizer: Any, text: str) -> Tensor:
    ids: Tensor = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    return ids


def _card(source: Path, config: MixtralConfig, record: Mapping[str, Any]) -> str:
    perplexities = record["perplexity"]
    rows = "".join(f"| {name} | {perplexities['dense'][name]:.2f} | {value:.2f} |\n" for name, value in
                   perplexities["mixture"].items())  # fmt: skip
    return (
        f"# {source.name} as a mixture of experts\n\nMade by `python -m study upcycle` of lowbit, for tests of quantized "
        f"experts: {config.num_local_experts} experts of {config.intermediate_size} channels in each layer, of which "
        f"{config.num_experts_per_tok} compute a token. The licence is that of the source. Recipe: {RECORD}.\n\n"
        f"| text | dense perplexity | this model |\n| --- | ---: | ---: |\n{rows}"
    )


# ---- the architecture


def mixture_config(dense: PretrainedConfig, recipe: Recipe) -> MixtralConfig:
    """Returns the config of the mixture. Raises ValueError unless the dense model is a Llama model without biases whose MLP has
    as many channels as an expert takes."""
    if dense.model_type != "llama" or dense.attention_bias or dense.mlp_bias:
        raise ValueError(
            f"a mixture is made of a Llama model without biases, which has Mixtral's attention; got {dense.model_type}"
        )
    channels = recipe.channels or dense.intermediate_size // 2
    if channels > dense.intermediate_size:
        raise ValueError(f"an expert takes {channels:,} channels, the dense MLP has {dense.intermediate_size:,}")
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "bos_token_id",
        "eos_token_id", "pad_token_id", "initializer_range",
    )  # fmt: skip
    config = MixtralConfig(
        **{name: getattr(dense, name) for name in same}, intermediate_size=channels, num_local_experts=recipe.experts,
        num_experts_per_tok=recipe.top_k, router_aux_loss_coef=recipe.balance, sliding_window=None,
    )  # fmt: skip
    # Both sum in a fixed order, forward and backward: with them a run on a GPU can be repeated.
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def build_mixture(dense: PreTrainedModel, config: MixtralConfig, layers: Sequence[ExpertWeights]) -> MixtralForCausalLM:
    """Returns the mixture in float32: the dense model's attention, norms and embeddings, and the experts of `layers`."""
    state = {name: value for name, value in dense.state_dict().items() if ".mlp." not in name}
    for i, layer in enumerate(layers):
        mlp = f"model.layers.{i}.mlp"
        state |= {f"{mlp}.gate.weight": layer.router, f"{mlp}.experts.gate_up_proj": layer.gate_up}
        state |= {f"{mlp}.experts.down_proj": layer.down}
    with torch.random.fork_rng(devices=[]):  # every weight is replaced
        mixture = MixtralForCausalLM(config)
    mixture.load_state_dict(state)
    mixture.generation_config = dense.generation_config
    return mixture.eval()


# ---- experts from the dense MLP


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of a layer's experts: router [E, H], gate_up [E, 2 I, H] and down [E, H, I], float32."""

    router: Tensor
    gate_up: Tensor
    down: Tensor


def fit_layers(
    source: Path, seen: Tensor, config: MixtralConfig, recipe: Recipe, device: str, progress: bool
) -> list[ExpertWeights]:
    """Returns the experts of all layers, fitted one layer after the other to the dense model's activations on pieces of the
    tokens `seen`, sampled without overlap. Raises ValueError if there are too few tokens."""
    available = len(seen) // recipe.length
    if available < recipe.samples:
        raise ValueError(
            f"{recipe.samples} x {recipe.length} tokens are asked for, the texts have {len(seen):,} in their first halves; "
            "take fewer or shorter samples, or more text"
        )
    generator = torch.Generator().manual_seed(recipe.seed)
    chosen = torch.randperm(available, generator=generator)[: recipe.samples].sort().values
    decoder = LayerwiseDecoder(CheckpointReader(source), device, torch.float32)
    hidden = decoder.embed(seen[: available * recipe.length].view(available, -1)[chosen])
    layers = []
    with Progress(total=len(decoder), desc="fitting experts", unit="layers", shown=progress) as bar:
        for i in range(len(decoder)):
            decoder.load(i)
            inputs: list[Tensor] = []
            decoder.observe(i, hidden, {"mlp.gate_proj": inputs.append})
            gate, up, down = (decoder.weight(i, f"mlp.{name}_proj") for name in ("gate", "up", "down"))
            layer = fit_layer(torch.cat([x.flatten(0, 1) for x in inputs]), gate, up, down, config, generator)
            layers.append(ExpertWeights(*(weight.cpu() for weight in (layer.router, layer.gate_up, layer.down))))
            hidden = list(decoder.run(i, hidden))
            decoder.free(i)
            bar.update()
    return layers


@torch.no_grad()
def fit_layer(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, config: MixtralConfig, generator: torch.Generator
) -> ExpertWeights:
    """Returns the experts of one layer for the inputs x [T, H] of a dense MLP with gate and up [C, H] and down [H, C]."""
    count = config.num_local_experts
    activations = F.silu(x @ gate.T) * (x @ up.T)
    contributions = activations.abs() * down.norm(dim=0)  # [T, C]: of each channel to the output
    labels = cluster(F.normalize(contributions, dim=1), count, generator)
    router = fit_router(x, labels, count)
    shares = route(x, router, config.num_experts_per_tok)
    y = activations @ down.T
    experts = [
        fit_expert(activations, contributions, y, shares[:, e], down, config.intermediate_size, len(x) / count)
        for e in range(count)
    ]
    gate_up = torch.stack([torch.cat((gate[kept], up[kept])) for kept, _ in experts])
    return ExpertWeights(router, gate_up, torch.stack([fitted for _, fitted in experts]))


def cluster(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Returns the cluster int64 [T] of each unit row of `rows` [T, C] by k-means with the cosine; no cluster is empty.

    Raises ValueError for fewer rows than clusters.
    """
    if len(rows) < count:
        raise ValueError(f"{count} clusters take as many tokens, got {len(rows)}")
    start = torch.randperm(len(rows), generator=generator)[:count].to(rows.device)
    centers = rows[start]
    for _ in range(CLUSTER_STEPS):
        likeness = rows @ centers.T
        labels = likeness.argmax(1)
        members = F.one_hot(labels, count).to(rows.dtype)
        for e in (members.sum(0) == 0).nonzero()[:, 0].tolist():
            crowd = int(members.sum(0).argmax())  # an empty cluster takes the row least like the largest one
            distant = likeness[:, crowd].masked_fill(labels != crowd, math.inf).argmin()
            labels[distant] = e
            members = F.one_hot(labels, count).to(rows.dtype)
        centers = F.normalize(members.T @ rows, dim=1)  # a product, since index_add has no fixed order on a GPU
    return labels


def fit_router(x: Tensor, labels: Tensor, count: int) -> Tensor:
    """Returns the weight [E, H] of a router without bias that tells the clusters int64 [T] of x [T, H] apart: logistic
    regression by L-BFGS, with a penalty on weights of channels of equal size."""
    size = x.square().mean(0).sqrt() + 1e-6
    scaled = x / size
    weight = torch.zeros(count, x.shape[1], device=x.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=ROUTER_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(scaled @ weight.T, labels) + ROUTER_DECAY * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return weight.detach() / size


def route(x: Tensor, router: Tensor, top_k: int) -> Tensor:
    """Returns the share [T, E] of each expert in the output for x [T, H], as Mixtral routes: those not chosen have 0."""
    values, chosen = (x @ router.T).softmax(-1).topk(top_k, dim=-1)
    shares = values / values.sum(-1, keepdim=True)
    return torch.zeros(len(x), len(router), device=x.device).scatter(1, chosen, shares)


def fit_expert(
    activations: Tensor, contributions: Tensor, y: Tensor, share: Tensor, down: Tensor, channels: int, mean_tokens: float
) -> tuple[Tensor, Tensor]:
    """Returns the channels int64 [I] that an expert keeps, sorted, and its down projection [H, I].

    Channels are those of the largest squared contributions [T, C], weighted by the expert's share [T]. The projection has the
    least squared error to the dense outputs y [T, H] from the kept activations, weighted likewise, plus `RIDGE` times its
    distance from the dense one [H, C]; an expert that no token reaches keeps the dense one.
    """
    reached = share > 0
    used = contributions.square()
    importance = (share[reached, None] * used[reached]).sum(0) + RIDGE * used.mean(0)
    kept = importance.topk(channels).indices.sort().values
    dense = down[:, kept]
    root = share[reached].sqrt()[:, None]
    a = activations[reached][:, kept] * root
    rest = y[reached] * root - a @ dense.T
    penalty = RIDGE * mean_tokens * activations[:, kept].square().mean()
    gram = a.T @ a + penalty * torch.eye(channels, device=a.device)
    correction = torch.linalg.solve(gram.double(), (a.T @ rest).double())
    return kept, dense + correction.T.float()


# ---- training


def distill(student: MixtralForCausalLM, teacher: PreTrainedModel, seen: Tensor, recipe: Recipe, progress: bool) -> list[float]:
    """Trains routers and experts on pieces of the tokens `seen` [N], sampled by the seed. Returns the divergence of each step.

    The loss is KL(teacher || student) of the next token plus `balance_loss`. Attention, norms and embeddings stay the dense
    model's. AdamW in float32; the learning rate rises over a tenth of the steps, then falls by a cosine. On a GPU products
    are in bfloat16.
    """
    device = student.device
    trained = [p for name, p in student.named_parameters() if ".mlp." in name]
    student.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe.steps))
    generator = torch.Generator().manual_seed(recipe.seed)
    losses: list[float] = []
    with Progress(total=recipe.steps, desc="training", unit="steps", shown=progress) as bar:
        for _ in range(recipe.steps):
            starts = torch.randint(len(seen) - recipe.length + 1, (recipe.batch,), generator=generator)
            ids = torch.stack([seen[start : start + recipe.length] for start in starts.tolist()]).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                with torch.no_grad():
                    expected = teacher(ids, use_cache=False).logits
                output = student(ids, use_cache=False, output_router_logits=True)
            kl = _divergence(expected, output.logits)
            (kl + recipe.balance * balance_loss(output.router_logits, recipe.top_k)).backward()
            torch.nn.utils.clip_grad_norm_(trained, GRADIENT_NORM, foreach=False)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(kl.detach()))
            bar.set_postfix_str(f", {losses[-1]:.3f} nats from the dense model", refresh=False)
            bar.update()
    student.requires_grad_(False)
    return losses


def _rate(step: int, steps: int) -> float:
    """Returns the learning rate of a step relative to the largest."""
    rising = max(steps // 10, 1)
    if step < rising:
        return (step + 1) / rising
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))


def _divergence(expected: Tensor, logits: Tensor) -> Tensor:
    """Returns the mean KL(expected || logits) in nats of logits [B, T, V]."""
    p, q = (each.float().flatten(0, 1).log_softmax(-1) for each in (expected, logits))
    return F.kl_div(q, p, reduction="batchmean", log_target=True)


def balance_loss(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """Returns the mean over layers of E * sum over experts of (share of the tokens' choices) * (mean probability), which is 1
    for equal experts. router_logits: [T, E] of each layer. Source: Switch Transformers (arXiv:2101.03961), equation 4."""
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(-1)
        chosen = probabilities.topk(top_k, dim=-1).indices
        shares = F.one_hot(chosen, logits.shape[-1]).float().mean((0, 1))
        losses.append(logits.shape[-1] * (shares * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


if __name__ == "__main__":
    app()
