"""The table of options; each is defined once, here or in its plug-in.

The command line, the environment of processes, validation, `--dry-run` and the reference page derive from this table.
Values are plain bool, int, float or str; durations are seconds, sizes bytes and rates bits per second, parsed from
text with a unit.
"""

from collections.abc import Callable, Iterable, Mapping

from geomx_cli.core.option import Group, Kind, Option, Value, check, decode, encode, text_of

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
"""Defaults that a codec changes for exchanges between parties: its residual takes the role of the outer momentum."""

OPTIONS: tuple[Option, ...] = (
    _cluster(
        "parties", "int", 2, "GEOMX_PARTIES", "Parties (data centres) that train. The central party does not count.",
        minimum=1, maximum=1024,
    ),
    _cluster(
        "workers", "int", 2, "GEOMX_WORKERS", "Workers in each party that --parties counts.", minimum=1, maximum=1024,
    ),
    _cluster(
        "central_workers", "int", 0, "GEOMX_CENTRAL_WORKERS",
        "Training workers in the central party. 0: the central party does not train.", minimum=0, maximum=1024,
    ),
    _cluster(
        "topology", "text", "auto", "GEOMX_TOPOLOGY",
        "Where the global servers run. central: in the central party. spread: in every party. flat: workers exchange"
        " with global servers directly, and there are no local servers. auto: if two or more parties train and their"
        " hosts reach each other, spread; otherwise central.", choices=("auto", "central", "spread", "flat"),
    ),
    _cluster(
        "global_servers", "int", 1, "GEOMX_GLOBAL_SERVERS",
        "Global servers among which the model is divided. With --topology spread: in each party.",
        minimum=1, maximum=256,
    ),
    _cluster(
        "local_servers", "int", 1, "GEOMX_LOCAL_SERVERS",
        "Local servers of each party, among which the model is divided.", minimum=1, maximum=64,
    ),
    _sync("algo", "text", "fsa", "GEOMX_ALGO", "Synchronisation algorithm."),
    _sync(
        "rank_scope", "text", "auto", "GEOMX_RANK_SCOPE",
        "Which workers a script's kv.rank and kv.num_workers count. global: the workers of all parties; rank 0 is the"
        " master worker. party: only the workers of the script's own party; the master worker is in the central party."
        " auto: party for HFA and for scripts with GeoMX's names (kv.num_all_workers, ...), otherwise global.",
        choices=("auto", "global", "party"),
    ),
    _sync(
        "delivery", "text", "direct", "GEOMX_DELIVERY",
        "How slices travel between processes: directly, or by a plug-in. --dgt and --tsengine choose a delivery too.",
    ),
    _sync(
        "reduce", "text", "servers", "GEOMX_REDUCE",
        "Where the gradients of a party's workers are added. servers: on its local servers. torch: among the workers,"
        " by torch.distributed; then one worker exchanges with the servers. torch is for PyTorch scripts with"
        " geomx_cli.torch.wrap, and for --algo fsa, sync, hfa, diloco or esync.", choices=("servers", "torch"),
    ),
    _sync(
        "shards", "int", 1, "GEOMX_SHARDS",
        "Shards into which PyTorch's fully_shard divides the model in each party, with --reduce torch. For each shard"
        " one worker exchanges with the servers. Further workers hold copies of the shards.",
        minimum=1, maximum=1024,
    ),
    _sync(
        "strict", "bool", False, "GEOMX_STRICT",
        "End the job if PyTorch's workers differ in their model or hyper-parameters. Without this option geomx warns,"
        " marks the result, and the job continues.",
    ),
    _sync(
        "p3", "bool", False, "ENABLE_P3",
        "Begin the next forward pass with the layers whose tensors have arrived, instead of waiting for the whole model"
        " (fsa, sync). For the bundled job and geomx_cli.torch; scripts with MXNet's KVStore always do so.",
    ),
    _net(
        "slice_elements", "int", 0, "MXNET_KVSTORE_BIGARRAY_BOUND",
        "Largest number of elements of a slice, the unit of transfer. geomx splits larger tensors. auto: depends on the"
        " number of global servers, and on whether all processes run on one host; with --p3, slices between hosts are"
        " shorter.",
        minimum=1024, maximum=8_388_608, word="auto",
    ),
    _net(
        "compress", "text", "", "GEOMX_COMPRESS",
        "Codec between parties and global servers; with --topology flat, between workers and servers. None by default."
        " Codecs that encode both directions: fp16, bf16, int8, q4, 1bit, topk:0.01, bsc:0.01, mpq:0.01, sparseloco."
        " Only the direction towards the servers: 2bit:0.5. topk and sparseloco are for hfa, esync and diloco. If you"
        " use them with fsa, the bundled job trains better with --optimizer-on worker.", takes_codec=True,
    ),
    _net(
        "compress_lan", "text", "", "GEOMX_COMPRESS_LAN",
        "Codec between workers and their local servers, and between central workers and global servers. It accepts the"
        " codecs of --compress. None by default.", takes_codec=True,
    ),
    _net(
        "compress_min", "int", 1000, "MXNET_KVSTORE_SIZE_LOWER_BOUND",
        "bsc and mpq make a tensor sparse only if it has at least this many elements (--compress, --compress-lan). bsc"
        " sends smaller tensors unencoded, and mpq sends them in fp16.", minimum=0, maximum=10**12,
    ),
    _net(
        "window", "size", 0, "GEOMX_WINDOW",
        "Bytes in flight on one link before the sender waits for credit. auto: geomx measures each link.",
        minimum=0, maximum=2**30, word="auto",
    ),
    _net(
        "wan", "wan", "", "GEOMX_WAN",
        "Emulate the links between parties on one machine: the rate of each party's link, the round trip, or both, such"
        " as 100mbit,30ms. The link of the central party has this rate too; all parties share this link.",
    ),
    _net("heartbeat", "duration", 1.0, "GEOMX_HEARTBEAT", "Time between heartbeats.", minimum=0.05, maximum=60),
    _net(
        "silence", "duration", 300.0, "GEOMX_SILENCE",
        "How long a link may be cut, or a process stopped, before the job ends. In jobs started by hand, a process that"
        " closes its connection has 10 seconds to reconnect.", minimum=0.5, maximum=86400,
    ),
    _net(
        "grace", "duration", 30.0, "GEOMX_GRACE",
        "How long scripts may take to save and end, before they are killed. The time begins when the job fails, or is"
        " stopped by Ctrl-C, SIGTERM, SIGUSR1, geomx stop or an expired lease.", minimum=0, maximum=86400,
    ),
    _net(
        "checkpoint_every", "duration", 600.0, "GEOMX_CHECKPOINT_EVERY",
        "Time between two checkpoints of the job, from which geomx launch --resume continues. 0: none. Each host keeps"
        " the newest two in hosts/HOST/checkpoints of the job's directory. Checkpoints need --restarts above 0, and"
        " scripts that call geomx.state.",
        minimum=0,
    ),
    _net(
        "checkpoint_to", "text", "", "GEOMX_CHECKPOINT_TO",
        "Where hosts upload each checkpoint while the job continues: a folder that all hosts share, or a URL that"
        " fsspec knows, such as s3://bucket/prefix. geomx keeps the newest two there, in a folder with the job's id."
        " --resume continues from there even if all machines are lost. For a URL, install geomx-cli[s3],"
        " geomx-cli[gcs] or geomx-cli[remote] on the hosts. Write no credentials: fsspec finds them on each host.",
    ),
    _net(
        "restarts", "int", 3, "GEOMX_RESTARTS",
        "How often within 10 minutes geomx restarts a killed agent, scheduler, server, or worker of the bundled job or"
        " of a script that calls geomx.state. Its next death ends the job. 0: the first death ends the job, and no"
        " process saves its state.",
        minimum=0, maximum=1000,
    ),
    _net(
        "on_worker_loss", "text", "end", "GEOMX_ON_WORKER_LOSS",
        "What happens when a worker dies whose script does not call geomx.state. end: the job ends. leave: the other"
        " workers continue, and means are over them. restart-all: all workers begin again, as under torchrun, at most"
        " --restarts times in 10 minutes. restart-all is for scripts that load their own snapshot.",
        choices=("end", "leave", "restart-all"),
    ),
    _net(
        "party_loss", "text", "auto", "GEOMX_PARTY_LOSS",
        "What happens when nothing is heard from a party for 5 rounds (at least 20 s, at most 2 min), and a round waits"
        " only for this party. out: the others continue, and the party counts as their mean. When it is back, it skips"
        " what it has missed. wait: the others wait for it, at most for --silence. end: the job ends. auto: out in"
        " bundled jobs of at least three parties with fsa, hfa or diloco and --topology central; otherwise wait.",
        choices=("auto", "out", "wait", "end"),
    ),
    _net(
        "absence", "duration", 3600.0, "GEOMX_ABSENCE",
        "With --party-loss out: how long links to a party may be silent before the job ends, if longer than --silence.",
        minimum=1, maximum=86400 * 30,
    ),
    _net(
        "timeout", "duration", 60.0, "GEOMX_TIMEOUT",
        "Longest wait for an answer outside a round. Time in which a link is cut does not count. In jobs started by"
        " hand --timeout also limits the wait until other processes join. With geomx launch scripts may join at any"
        " time.",
        minimum=1, maximum=86400,
    ),
    _net(
        "patience", "duration", 600.0, "GEOMX_PATIENCE",
        "Longest wait for a round or barrier without progress while all links work. If a worker's script uses"
        " processor time, this counts as progress.",
        minimum=1, maximum=86400 * 7,
    ),
    _train(
        "network", "text", "cnn", "GEOMX_NETWORK",
        f"Network to train: {', '.join(_NETWORKS)}; or MODULE:FUNCTION. linear needs no framework. --framework torch"
        " has only cnn, cnn-bn, resnet18-v1 and gpt. FUNCTION gets the number of classes and returns a gluon"
        " HybridBlock, or with --framework torch a Module.", suggestions=_NETWORKS,
    ),
    _train(
        "framework", "text", "auto", "GEOMX_FRAMEWORK",
        "Framework of the bundled network (linear needs none), or of a script. auto, with a script: the framework that"
        " it imports. auto, without a script: the first of torch and mxnet that is installed where geomx launch runs,"
        " and has the network. If geomx cannot read the script, such as bash train.sh or python -m with an installed"
        " module, give this option.",
        choices=("auto", "torch", "mxnet"),
    ),
    _train(
        "layers", "int", 4, "GEOMX_LAYERS", "Layers of gpt. 4 layers of width 192 have 1.9 million parameters, and 6 of"
        " width 384 have 10.8 million.", minimum=1, maximum=128,
    ),
    _train(
        "width", "int", 192, "GEOMX_WIDTH", "Width of gpt's layers, a multiple of 64, which is the width of an"
        " attention head.", minimum=64, maximum=8192,
    ),
    _train(
        "context", "int", 128, "GEOMX_CONTEXT", "Length of gpt's context, and of a sample, in characters.",
        minimum=2, maximum=4096,
    ),
    _train(
        "data", "text", "fashion-mnist", "GEOMX_DATA",
        f"Data set: {', '.join(_DATA_SETS)}; or MODULE:FUNCTION. With gpt the default is austen. FUNCTION gets train or"
        " test, and --data-dir. It returns images and labels as numpy arrays; for gpt it returns a text, str or bytes.",
        suggestions=_DATA_SETS,
    ),
    _train("data_dir", "text", "", "GEOMX_DATA_DIR", "Directory of the data set. By default geomx searches for it."),
    _train(
        "split", "text", "iid", "GEOMX_SPLIT",
        "How the training data are divided among the workers. iid: evenly, at random. by-class: each worker has one"
        " class or a few. by-party: each party has classes of its own, mixed among its workers. dirichlet:ALPHA: a"
        " smaller ALPHA makes classes and sizes more uneven.",
        suggestions=("iid", "by-class", "by-party", "dirichlet:0.3"),
    ),
    _train(
        "batch_size", "int", 64, "GEOMX_BATCH_SIZE", "Samples in one worker's batch. With gpt the default is 16.",
        minimum=1, maximum=65536,
    ),
    _train(
        "epochs", "int", 4, "GEOMX_EPOCHS",
        "Passes over the training data. With esync: passes of the slowest worker; the other workers take more.",
        minimum=1, maximum=100_000,
    ),
    _train(
        "time_limit", "duration", 0.0, "GEOMX_TIME_LIMIT",
        "Stop training after this long, at the end of a round.", minimum=0, word="never",
    ),
    _train(
        "optimizer", "text", "sgd", "GEOMX_OPTIMIZER", "Optimizer. With gpt the default is adamw.",
        choices=tuple(OPTIMIZERS),
    ),
    _train(
        "optimizer_on", "text", "server", "GEOMX_OPTIMIZER_ON",
        "Where the optimizer runs. server: on global servers, which send weights. worker: on workers, to which global"
        " servers send summed gradients.",
        choices=("server", "worker"),
    ),
    _train(
        "lr", "float", 0.0, "GEOMX_LR",
        "Learning rate. auto: 0.05 for sgd, nag and all dcasgd optimizers, 0.01 for adagrad, 0.001 for others.",
        minimum=0, maximum=1e6, word="auto",
    ),
    _train(
        "schedule", "text", "constant", "GEOMX_SCHEDULE",
        "Learning rate over time. cosine: the rate rises to --lr in --warmup steps, then falls to a tenth of --lr by"
        " the last step. With gpt the default is cosine. The outer step of diloco has a learning rate of its own.",
        choices=("constant", "cosine"),
    ),
    _train(
        "warmup", "int", -1, "GEOMX_WARMUP", "Steps in which the learning rate rises (--schedule cosine). auto: a"
        " twentieth of all steps.", minimum=0, maximum=10**9, word="auto",
    ),
    _train(
        "momentum", "float", 0.9, "GEOMX_MOMENTUM",
        "Momentum of sgd, nag and all dcasgd optimizers. If workers send gradients (fsa, mixed) and the codec"
        " is bsc, mpq or 1bit, geomx sets the momentum to 0. The reason: bsc and mpq have momentum themselves. With"
        " 1bit and momentum, training diverges.",
        minimum=0, below=1,
    ),
    _train(
        "dc_lambda", "float", 0.0, "GEOMX_DC_LAMBDA",
        "How strongly the dcasgd optimizers compensate for delay. auto: 2 for dcasgd-a, otherwise 0.04.",
        minimum=0, maximum=1e6, word="auto",
    ),
    _train(
        "dc_decay", "float", 0.95, "GEOMX_DC_DECAY",
        "Decay of the moving mean square of gradients, by which dcasgd-a divides.", minimum=0, below=1,
    ),
    _train(
        "slowdown", "text", "", "GEOMX_SLOWDOWN",
        "Emulate slow workers. WHO=N multiplies the time of a step by N; WHO is a worker or a party. N without WHO"
        " slows the last worker. Commas separate several entries.",
    ),
    _train("seed", "int", 1, "GEOMX_SEED", "Seed of initial weights and of the order of samples.", minimum=0),
    _train(
        "eval_every", "int", 100, "GEOMX_EVAL_EVERY",
        "Steps of a worker between two evaluations of the global model. 0: geomx evaluates only at the end.",
        minimum=0,
    ),
    _train(
        "save_every", "int", 0, "GEOMX_SAVE_EVERY",
        "Steps between two checkpoints of the weights. Global rank 0 writes them to checkpoints/ in its output folder,"
        " each at the end of a round. It writes another one at the end of the job. geomx fetch fetches them.",
        minimum=0, word="never",
    ),
    _train(
        "target_accuracy", "float", 0.0, "GEOMX_TARGET_ACCURACY",
        "Stop when the test accuracy reaches this value.", minimum=0, maximum=1, word="never",
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
