"""The table of options; each is defined once, here or in its plug-in.

The command line, the environment of processes, validation, `--dry-run` and the reference page derive from this table.
Values are plain bool, int, float or str; durations are seconds, sizes bytes and rates bits per second, parsed from
text with a unit.
"""

from collections.abc import Callable, Iterable, Mapping

from geomx_cli.core.option import Group, Option, Value, check, decode, encode, text_of
from geomx_cli.core.option_kinds import Kind

__all__ = [
    "OPTIMIZERS", "OPTIONS", "USUAL", "USUAL_OF_CODEC", "Option", "Value", "check", "codec_name", "decode", "defaults",
    "encode", "text_of", "with_usual_rate",
]  # fmt: skip


def _option(group: Group) -> Callable[..., Option]:
    def make(name: str, kind: Kind, default: Value, env: str, text: str, **rest: object) -> Option:
        return Option(name, kind, default, env, text, group, **rest)  # type: ignore[arg-type]

    return make


_cluster, _sync, _net, _train = (
    _option("cluster"),
    _option("synchronisation"),
    _option("transport"),
    _option("training"),
)

_MOMENTUM = {"momentum": "momentum"}
_COMPENSATING = {**_MOMENTUM, "dc_lambda": "lamda"}
OPTIMIZERS: Mapping[str, tuple[float, Mapping[str, str]]] = {
    "sgd": (0.05, _MOMENTUM), "nag": (0.05, _MOMENTUM), "adam": (0.001, {}), "adagrad": (0.01, {}),
    "rmsprop": (0.001, {}), "adamw": (0.001, {}), "dcasgd": (0.05, _COMPENSATING),
    "dcasgd-a": (0.05, {**_COMPENSATING, "dc_decay": "decay"}), "dcasgd-mxnet": (0.05, _COMPENSATING),
}  # fmt: skip
"""For each optimizer: its default learning rate, and its hyper-parameters by option."""

_NETWORKS = (
    "linear", "cnn", "cnn-bn", "alexnet", "resnet18-v1", "resnet50-v1", "resnet50-v2", "mobilenet-v1", "mobilenet-v2",
    "inception-v3", "gpt",
)  # fmt: skip
_DATA_SETS = ("fashion-mnist", "mnist", "cifar10", "austen")
USUAL: Mapping[str, Mapping[str, Value]] = {
    "gpt": {"framework": "torch", "data": "austen", "optimizer": "adamw", "schedule": "cosine", "batch_size": 16},
}
"""Defaults of the command line that a network changes."""
USUAL_OF_CODEC: Mapping[str, Mapping[str, Value]] = {"sparseloco": {"outer_lr": 1.0, "outer_momentum": 0.0}}
"""Those that a codec changes, of what parties exchange: its residual takes the role of the outer momentum."""

OPTIONS: tuple[Option, ...] = (
    _cluster("parties", "int", 2, "GEOMX_PARTIES", "Participating parties (data centres).", minimum=1, maximum=1024),
    _cluster("workers", "int", 2, "GEOMX_WORKERS", "Workers in each participating party.", minimum=1, maximum=1024),
    _cluster(
        "central_workers", "int", 0, "GEOMX_CENTRAL_WORKERS",
        "Workers of the central party that train beside the master worker.", minimum=0, maximum=1024,
    ),
    _cluster(
        "topology", "text", "auto", "GEOMX_TOPOLOGY",
        "Where the global servers run: in the central party, spread over the parties, or one flat plane"
        " without local servers. auto: spread where two or more parties train and their hosts reach each other, else"
        " central.", choices=("auto", "central", "spread", "flat"),
    ),
    _cluster(
        "global_servers", "int", 1, "GEOMX_GLOBAL_SERVERS",
        "Global servers that share the model (with --topology spread: in each party).", minimum=1, maximum=256,
    ),
    _cluster(
        "local_servers", "int", 1, "GEOMX_LOCAL_SERVERS",
        "Local servers in each party that share the model.", minimum=1, maximum=64,
    ),
    _sync("algo", "text", "fsa", "GEOMX_ALGO", "Synchronisation algorithm."),
    _sync(
        "rank_scope", "text", "auto", "GEOMX_RANK_SCOPE",
        "What a script's kv.rank and kv.num_workers count: global, the workers of all parties, of which rank 0 is the"
        " master; or party, those of its own, beside a master worker. auto: party for a script that uses GeoMX's names"
        " (kv.num_all_workers, ...) and for HFA, else global.",
        choices=("auto", "global", "party"),
    ),
    _sync(
        "delivery", "text", "direct", "GEOMX_DELIVERY",
        "How slices are delivered: directly, or by an installed plug-in. --dgt and --tsengine choose a delivery too.",
    ),
    _sync(
        "reduce", "text", "servers", "GEOMX_REDUCE",
        "What adds the gradients of a party's workers: its local servers; or torch.distributed among the workers, of"
        " which one exchanges with the servers (torch: PyTorch scripts with geomx_cli.torch.wrap; --algo fsa, sync,"
        " hfa, diloco or esync).", choices=("servers", "torch"),
    ),
    _sync(
        "shards", "int", 1, "GEOMX_SHARDS",
        "Shards into which PyTorch's fully_shard divides the model in each party, with --reduce torch: as many of its"
        " workers exchange with the servers, each its own shard. More workers hold further copies of the shards.",
        minimum=1, maximum=1024,
    ),
    _sync(
        "strict", "bool", False, "GEOMX_STRICT",
        "End the job once PyTorch's workers train different models, or with other hyper-parameters. Without it the"
        " result is marked.",
    ),
    _sync(
        "p3", "bool", False, "ENABLE_P3",
        "Begin the next forward pass with the layers whose tensors have come, instead of waiting for the whole model"
        " (fsa, sync): in the bundled job and with geomx_cli.torch. Scripts with MXNet's KVStore always do.",
    ),
    _net(
        "slice_elements", "int", 0, "MXNET_KVSTORE_BIGARRAY_BOUND",
        "Elements per slice, the unit of transfer; larger tensors are split. auto: by how many global"
        " servers there are, and whether they are across the WAN; with --p3 they are shorter there.",
        minimum=1024, maximum=8_388_608, word="auto",
    ),
    _net(
        "compress", "text", "", "GEOMX_COMPRESS",
        "Codec of what crosses between parties and global servers, in both directions: fp16, bf16, int8, q4, 1bit,"
        " topk:0.01, bsc:0.01, mpq:0.01, sparseloco; or upwards only: 2bit:0.5. None by default. In a flat"
        " cluster, between workers and servers. topk and sparseloco are for hfa, esync and diloco; with fsa the bundled"
        " job trains better with --optimizer-on worker.", takes_codec=True,
    ),
    _net(
        "compress_lan", "text", "", "GEOMX_COMPRESS_LAN",
        "Codec of what workers exchange with their local servers, and central workers with global servers, in both"
        " directions, as --compress. None by default.", takes_codec=True,
    ),
    _net(
        "compress_min", "int", 1000, "MXNET_KVSTORE_SIZE_LOWER_BOUND",
        "Elements of the smallest tensors that bsc and mpq make sparse (--compress, --compress-lan); bsc sends smaller"
        " ones unencoded, mpq in fp16.", minimum=0, maximum=10**12,
    ),
    _net(
        "window", "size", 0, "GEOMX_WINDOW",
        "Bytes in flight on one link before the sender waits for credit. auto: measured per link.",
        minimum=0, maximum=2**30, word="auto",
    ),
    _net(
        "wan", "wan", "", "GEOMX_WAN",
        "Shape the links between parties on one machine: rate of a party's link, round trip, or both, as 100mbit,30ms."
        " The central party's link has that rate too, for all parties together.",
    ),
    _net("heartbeat", "duration", 1.0, "GEOMX_HEARTBEAT", "Time between heartbeats.", minimum=0.05, maximum=60),
    _net(
        "silence", "duration", 300.0, "GEOMX_SILENCE",
        "How long a link may be cut, or a process stopped, before the job ends. In jobs started by hand, a process"
        " whose connection is closed, not cut, has 10 seconds to come back.", minimum=0.5, maximum=86400,
    ),
    _net(
        "grace", "duration", 30.0, "GEOMX_GRACE",
        "How long scripts may take to save and end when the job is stopped, by Ctrl-C, SIGTERM, geomx stop or a lease"
        " that has expired, or has failed; then they are killed.", minimum=0, maximum=86400,
    ),
    _net(
        "timeout", "duration", 60.0, "GEOMX_TIMEOUT",
        "Longest wait for an answer outside a round, and in jobs started by hand for the other processes to join; while"
        " a link is cut it does not pass. Scripts that geomx launch has started may take any time until they join.",
        minimum=1, maximum=86400,
    ),
    _net(
        "patience", "duration", 600.0, "GEOMX_PATIENCE",
        "Longest wait for a round or barrier without progress while all links work. A worker whose script uses"
        " processor time makes progress.",
        minimum=1, maximum=86400 * 7,
    ),
    _train(
        "network", "text", "cnn", "GEOMX_NETWORK",
        f"Network to train: {', '.join(_NETWORKS)} (linear needs no framework; torch has cnn, cnn-bn, resnet18-v1 and"
        " gpt), or MODULE:FUNCTION, which is called with the number of classes and returns a gluon HybridBlock, or with"
        " --framework torch a Module.", suggestions=_NETWORKS,
    ),
    _train(
        "framework", "text", "auto", "GEOMX_FRAMEWORK",
        "Framework of the bundled network (linear needs none), or the one that a script imports. auto: for a script"
        " what it imports; otherwise the first of torch and mxnet that is installed where launch runs and has the"
        " network. Needed where launch cannot read the script, such as bash train.sh, or python -m with an installed"
        " module.",
        choices=("auto", "torch", "mxnet"),
    ),
    _train(
        "layers", "int", 4, "GEOMX_LAYERS", "Layers of gpt; 4 of width 192 are 1.9 million parameters, 6 of 384 are"
        " 10.8 million.", minimum=1, maximum=128,
    ),
    _train(
        "width", "int", 192, "GEOMX_WIDTH", "Width of gpt's layers, a multiple of 64: each attention head has 64.",
        minimum=64, maximum=8192,
    ),
    _train(
        "context", "int", 128, "GEOMX_CONTEXT", "Characters that gpt sees; a sample is as many.",
        minimum=2, maximum=4096,
    ),
    _train(
        "data", "text", "fashion-mnist", "GEOMX_DATA",
        f"Data set: {', '.join(_DATA_SETS)}, or MODULE:FUNCTION, which is called with train or test and with"
        " --data-dir and returns images and labels, as numpy arrays, or for gpt a text, str or bytes. By default"
        " austen with gpt.", suggestions=_DATA_SETS,
    ),
    _train("data_dir", "text", "", "GEOMX_DATA_DIR", "Directory of the data set; searched for if not given."),
    _train(
        "split", "text", "iid", "GEOMX_SPLIT",
        "How the training data are divided among the workers: iid, by-class (each worker has one class or a few),"
        " by-party (each party has classes of its own, mixed among its workers), or dirichlet:ALPHA (the smaller ALPHA,"
        " the more uneven the classes and the sizes).", suggestions=("iid", "by-class", "by-party", "dirichlet:0.3"),
    ),
    _train(
        "batch_size", "int", 64, "GEOMX_BATCH_SIZE", "Samples in one worker's batch; 16 with gpt.", minimum=1,
        maximum=65536,
    ),
    _train(
        "epochs", "int", 4, "GEOMX_EPOCHS",
        "Passes over the training data; with esync those of the slowest worker, and the others take more.",
        minimum=1, maximum=100_000,
    ),
    _train(
        "time_limit", "duration", 0.0, "GEOMX_TIME_LIMIT", "Stop training after this long.", minimum=0, word="never",
    ),
    _train("optimizer", "text", "sgd", "GEOMX_OPTIMIZER", "Optimizer; adamw with gpt.", choices=tuple(OPTIMIZERS)),
    _train(
        "optimizer_on", "text", "server", "GEOMX_OPTIMIZER_ON",
        "Where the optimizer runs: global servers answer with weights, or with summed gradients for the workers.",
        choices=("server", "worker"),
    ),
    _train(
        "lr", "float", 0.0, "GEOMX_LR",
        "Learning rate. auto: 0.05 for sgd, nag and dcasgd of any kind, 0.01 for adagrad, 0.001 for the others.",
        minimum=0, maximum=1e6, word="auto",
    ),
    _train(
        "schedule", "text", "constant", "GEOMX_SCHEDULE",
        "Course of the learning rate: constant, or cosine, which rises in --warmup steps to --lr and falls to a tenth"
        " of it by the last step; with gpt cosine. The outer step of diloco has a rate of its own.",
        choices=("constant", "cosine"),
    ),
    _train(
        "warmup", "int", -1, "GEOMX_WARMUP", "Steps in which the learning rate rises (--schedule cosine). auto: a"
        " twentieth of all.", minimum=0, maximum=10**9, word="auto",
    ),
    _train(
        "momentum", "float", 0.9, "GEOMX_MOMENTUM",
        "Momentum of sgd, nag and dcasgd of any kind. Where workers send gradients (fsa, mixed), 0 with bsc and mpq"
        " (--compress, --compress-lan), which have momentum themselves, and with 1bit, which diverges with it.",
        minimum=0, below=1,
    ),
    _train(
        "dc_lambda", "float", 0.0, "GEOMX_DC_LAMBDA",
        "How strongly dcasgd of any kind compensates for delay. auto: 2 for dcasgd-a, 0.04 for the others.",
        minimum=0, maximum=1e6, word="auto",
    ),
    _train(
        "dc_decay", "float", 0.95, "GEOMX_DC_DECAY",
        "Decay of the mean square of gradients by which dcasgd-a divides.", minimum=0, below=1,
    ),
    _train(
        "slowdown", "text", "", "GEOMX_SLOWDOWN",
        "Emulate stragglers: WHO=N, where WHO is a worker or party, multiplies the time of its steps by N;"
        " N alone is for the last worker. Several are separated by commas.",
    ),
    _train("seed", "int", 1, "GEOMX_SEED", "Seed of initial weights and of the order of samples.", minimum=0),
    _train(
        "eval_every", "int", 100, "GEOMX_EVAL_EVERY",
        "Steps of a worker between two evaluations of the global model; 0: only at the end.", minimum=0,
    ),
    _train(
        "checkpoint_every", "int", 0, "GEOMX_CHECKPOINT_EVERY",
        "Steps between two files of weights that global rank 0 writes at a round's end, and one at the end, to"
        " checkpoints/ in its output folder; geomx fetch brings them.", minimum=0, word="never",
    ),
    _train(
        "target_accuracy", "float", 0.0, "GEOMX_TARGET_ACCURACY",
        "Stop when the test accuracy reaches this.", minimum=0, maximum=1, word="never",
    ),
)  # fmt: skip


def defaults(table: Iterable[Option] = OPTIONS) -> dict[str, Value]:
    """Return the default value of every option."""
    return {option.name: option.default for option in table}


def codec_name(spec: str) -> str:
    """The NAME of a codec's SPEC, which is NAME or NAME:ARGUMENT."""
    return spec.partition(":")[0]


def with_usual_rate(options: Mapping[str, Value]) -> Mapping[str, Value]:
    """Return the bundled job's options with the optimizer's usual learning rate in place of 0."""
    usual, _ = OPTIMIZERS.get(str(options.get("optimizer")), (0.0, {}))
    return {**options, "lr": options["lr"] or usual} if "lr" in options else options
