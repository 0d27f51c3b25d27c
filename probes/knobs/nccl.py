"""NCCL's variables, and torch's for NCCL: how many CTAs a collective may take, on which streams, how it is sent."""

from harness.config import Trainer
from harness.recording import Mode
from probes.knobs.knob import UNSET, Arm, Inaction, Knob

ALGORITHM = "(?:ring|tree|collnetdirect|collnetchain|nvls|nvlstree|pat)"
PROTOCOL = "(?:ll|ll128|simple)"
FUNCTION = "(?:allreduce|allgather|reducescatter|broadcast|reduce)"
CTAS = r"[1-9]|[1-5]\d|6[0-4]"
"""NCCL takes no count below 1 and caps it at its 64 channels, both silently (src/init.cc `envConfigOverride`)."""


def _choice(element: str) -> str:
    """What NCCL reads: `ring,tree`, `^tree`, `allreduce:tree;allgather:ring` (src/graph/tuning.cc `parseList`)."""
    one = rf"(?:{FUNCTION}:)?\^?{element}(?:,{element})*"
    return rf"{one}(?:;{one})*"


def _nothing_sent(config: Trainer.Config, mode: Mode, arm: Arm) -> Inaction | None:
    if mode == "rehearsal":
        return Inaction("unavailable in this build", "mode rehearsal sends nothing: its process groups are not NCCL's")
    if config.world_size == 1:
        return Inaction("unavailable in this build", "a single rank sends nothing: use two or more (--nproc)")
    return None


def _no_stream_of_nccl(config: Trainer.Config, mode: Mode, arm: Arm) -> Inaction | None:
    layout = config.parallelism
    if layout.tp == 1 and layout.pp == 1 and not layout.fsdp_async_unshard:
        return _nothing_sent(config, mode, arm) or Inaction(
            "ignored by this build",
            "no collective of this run uses the streams of NCCL's process groups: since torch 2.8 only asynchronous "
            "ones and point-to-point do, and FSDP2 has its own; it takes tp of 2 or more, pp, or "
            "--parallelism.fsdp_async_unshard true",
        )
    return _nothing_sent(config, mode, arm)


def _nothing_registered(config: Trainer.Config, mode: Mode, arm: Arm) -> Inaction | None:
    return _nothing_sent(config, mode, arm) or Inaction(
        "ignored by this build",
        "1 (efficiency) acts on registered buffers and 2 (zero) on windows of symmetric memory (NCCL's "
        "src/enqueue.cc); this trainer's tensors are neither",
    )


KNOBS = (
    Knob(
        name="nccl.max_ctas",
        hypothesis="collectives that take fewer SMs leave more to the computation they overlap with, and take longer: "
        "good where communication is hidden, bad where it is exposed",
        acts_on="NCCL 2.17 and later, two ranks or more; every communicator; mode shared-gpu sets it by itself",
        metric="step_wall_ns",
        variable="NCCL_MAX_CTAS",
        values=(UNSET, "4", "16"),
        pattern=CTAS,
        expects="a number of CTAs from 1 to 64",
        needs_cuda=True,
        inaction=_nothing_sent,
        known=("unset: NCCL chooses by topology", "ranks that share a GPU under MPS dead-lock without a cap"),
    ),
    Knob(
        name="nccl.min_ctas",
        hypothesis="collectives that take more SMs than NCCL would give them end sooner where they are exposed",
        acts_on="NCCL 2.17 and later, two ranks or more; every communicator",
        metric="step_wall_ns",
        variable="NCCL_MIN_CTAS",
        values=(UNSET, "16", "32"),
        pattern=CTAS,
        expects="a number of CTAs from 1 to 64",
        needs_cuda=True,
        inaction=_nothing_sent,
        known=("unset: NCCL chooses by topology",),
    ),
    Knob(
        name="nccl.cta_policy",
        hypothesis="collectives that give SMs up (1, efficiency), or use copy engines instead (2, zero), leave more to "
        "the computation they overlap with",
        acts_on="NCCL 2.27 (1) and 2.28 (2) and later, on registered or symmetric memory only",
        metric="step_wall_ns",
        variable="NCCL_CTA_POLICY",
        default="0",
        values=(UNSET, "1", "2"),
        pattern="[0-3]",
        expects="0 (default), 1 (efficiency), 2 (zero) or 3 (both)",
        needs_cuda=True,
        inaction=_nothing_registered,
        known=("2 needs FSDPModule.set_symm_mem_for_comm, which this trainer does not use",),
    ),
    Knob(
        name="nccl.high_priority",
        hypothesis="communication whose stream has the higher priority is started before computation that is queued, "
        "so that what waits for it waits less",
        acts_on="ProcessGroupNCCL's own streams: asynchronous collectives (TP, fsdp_async_unshard) and point-to-point; "
        "FSDP2's all-gathers and reduce-scatters are on streams of FSDP2, which have that priority already",
        metric="step_wall_ns",
        variable="TORCH_NCCL_HIGH_PRIORITY",
        default="0",
        values=(UNSET, "1"),
        pattern="[01]",
        expects="0 or 1",
        needs_cuda=True,
        inaction=_no_stream_of_nccl,
        known=("since torch 2.8 synchronous collectives run on the caller's stream, up to 2.7 all ran on NCCL's own",),
    ),
    Knob(
        name="nccl.p2p",
        hypothesis="without direct access between GPUs everything goes through host memory: slower, and how much "
        "slower is what NVLink or PCIe peer access is worth here",
        acts_on="GPUs of one host that can reach each other, two ranks or more",
        metric="step_wall_ns",
        variable="NCCL_P2P_DISABLE",
        default="0",
        values=(UNSET, "1"),
        pattern="[01]",
        expects="0 or 1",
        needs_cuda=True,
        inaction=_nothing_sent,
        known=("a diagnosis more than a setting: 1 is for machines whose peer access is broken",),
    ),
    Knob(
        name="nccl.algorithm",
        hypothesis="NCCL's own choice of algorithm is not the fastest for these sizes and this topology",
        acts_on="two ranks or more; all-gather and reduce-scatter have no tree; NVLS needs NVSwitch",
        metric="step_wall_ns",
        variable="NCCL_ALGO",
        values=(UNSET, "Ring", "NVLS"),
        pattern=_choice(ALGORITHM),
        expects="of NCCL's algorithms (Ring, Tree, CollNetDirect, CollNetChain, NVLS, NVLSTree, PAT; "
        "allreduce:tree for one collective)",
        normal=str.lower,
        needs_cuda=True,
        inaction=_nothing_sent,
        known=("one that a collective does not have ends the run with NCCL's error, and the arm with it",),
    ),
    Knob(
        name="nccl.protocol",
        hypothesis="NCCL's own choice of protocol is not the fastest for these sizes: LL and LL128 have less latency, "
        "Simple more bandwidth",
        acts_on="two ranks or more",
        metric="step_wall_ns",
        variable="NCCL_PROTO",
        values=(UNSET, "Simple", "LL128"),
        pattern=_choice(PROTOCOL),
        expects="of NCCL's protocols (LL, LL128, Simple; allreduce:ll for one collective)",
        normal=str.lower,
        needs_cuda=True,
        inaction=_nothing_sent,
        known=("NCCL's guide: LL128 forced where the platform does not guarantee its stores can corrupt data",),
    ),
)
