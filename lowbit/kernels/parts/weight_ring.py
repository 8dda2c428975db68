"""A ring of stages of weights, copied by one thread, and the constants that come with the first of them, as PTX.

Barriers: parts/pipeline.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.pipeline import StageBarriers


@dataclass(frozen=True)
class WeightRing:
    """Stages of `stage_bytes` from byte `start` of shared memory on, tables of `table_bytes` each from `constants_start` on."""

    barriers: StageBarriers
    start: int
    stage_bytes: int
    constants_start: int
    tables: int
    table_bytes: int

    @property
    def copy(self) -> str:
        """Waits until stage $1 has been read (parity $2), then fills it from $3."""
        bars = self.barriers
        return f"""{{ .reg .pred done; .reg .b32 at, bar, to;
            mov.u32 at, global_smem; mad.lo.u32 bar, $1, 8, at; mad.lo.u32 to, $1, {self.stage_bytes}, at;
            WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [bar+{bars.start + 8 * bars.stages}], $2; @!done bra WAIT;
            add.u32 bar, bar, {bars.start}; add.u32 to, to, {self.start};
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {self.stage_bytes};
            cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [$3], {self.stage_bytes}, [bar];
            mov.b32 $0, 0; }}"""

    @property
    def copy_constants(self) -> str:
        """Copies the tables at $1, $2 and, where there are three, $3 to shared memory; they come with the first weights."""
        copies = [
            f"add.u32 to, at, {self.constants_start + i * self.table_bytes}; "
            f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [${1 + i}], {self.table_bytes}, [bar];"
            for i in range(self.tables)
        ]
        lines = [
            f"{{ .reg .b32 at, bar, to; mov.u32 at, global_smem; add.u32 bar, at, {self.barriers.start};",
            f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], {self.tables * self.table_bytes};",
            *copies,
            "mov.b32 $0, 0; }",
        ]
        return "\n".join(lines)
