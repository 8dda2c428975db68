"""Attention of a step beside FlashAttention-3 of vLLM's build, the same pages and order; ours also turns q and k and appends."""
import statistics
import torch
from lowbit.bench.attention import LLAMA, make_batch, tiles_to_time, time_tiles
from lowbit.bench.protocol import REPLAYS, capture, copies_needed, l2_bytes, warm_up
from lowbit.hardware.machine import machine_of
from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

machine = machine_of("cuda")
warm_up()
for rows, context in ((1, 1024), (16, 1024), (64, 1024), (16, 8192), (1, 32768)):
    nbytes = rows * context * LLAMA.token_bytes
    batch = make_batch(rows, context, LLAMA, torch.float16, copies_needed(nbytes, l2_bytes()), "cuda")
    caches = [(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()) for k, v in batch.caches]
    q = batch.qkv[:, : LLAMA.heads * LLAMA.head_dim].reshape(rows, LLAMA.heads, LLAMA.head_dim).contiguous()
    starts, used = torch.arange(rows + 1, dtype=torch.int32, device="cuda"), torch.full((rows,), context, dtype=torch.int32, device="cuda")
    call = lambda k, v: flash_attn_varlen_func(q, k, v, 1, starts, context, seqused_k=used, causal=True, block_table=batch.tables, fa_version=3)
    fa3 = statistics.median(capture([lambda k=k, v=v: call(k, v) for k, v in caches]).times_us(REPLAYS))
    (own,) = list(time_tiles(rows, context, LLAMA, torch.float16, tiles_to_time(rows, context, LLAMA, machine, 1)[:1], machine))
    limit = 1e6 * nbytes / machine.read_bytes
    print(f"B {rows} context {context}: FA3 {fa3:.2f} us ({limit / fa3:.2f} of the bandwidth), {own}", flush=True)
    del batch, caches
    torch.cuda.empty_cache()
