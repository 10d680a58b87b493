"""A worker of MXNet's dist_sync in recovery_peers.py, whose optimizer runs on the server. argv: none of its own.

ps-lite lets a process that comes back take the place of a dead one. The server has the weights, the momentum and the
learning rate; the worker saves its place in the data.
"""


import mxnet as mx
from mxnet import autograd, gluon
from recovery_task import BATCH, DECAY, MOMENTUM, RATE, WORKERS, Worker, decay


def main() -> None:
    store = mx.kv.create("dist_sync")
    worker, first = Worker(store.rank), 0
    # recovery: begin
    file = worker.folder / f"place{worker.rank}"
    if file.exists():
        first = int(file.read_text())
    # recovery: end
    mx.random.seed(7)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(64, activation="relu", in_units=28 * 28), gluon.nn.Dense(10, in_units=64))
    net.initialize(mx.init.Xavier())
    parameters = list(net.collect_params().values())
    for key, item in enumerate(parameters):
        store.init(key, item.data())
    if not first:  # recovery: else the server's momentum and learning rate would begin again
        schedule = mx.lr_scheduler.FactorScheduler(step=1, factor=DECAY, base_lr=RATE)
        scale = 1 / (BATCH * WORKERS)
        store.set_optimizer(
            mx.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM, lr_scheduler=schedule, rescale_grad=scale)
        )
    for key, item in enumerate(parameters):
        store.pull(key, out=item.data())
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(first, worker.steps):
        chosen, images, labels = worker.batch(step)
        with autograd.record():
            loss = loss_of(net(mx.nd.array(images)), mx.nd.array(labels))
        loss.backward()
        for key, item in enumerate(parameters):
            store.push(key, item.grad(), priority=-key)
            store.pull(key, out=item.data(), priority=-key)
        mx.nd.waitall()
        # recovery: begin
        half = file.with_suffix(".new")
        half.write_text(str(step + 1))
        half.replace(file)
        # recovery: end
        worker.done(step, RATE * decay(step), chosen)
    worker.end([item.data().asnumpy() for item in parameters])


if __name__ == "__main__":
    main()
