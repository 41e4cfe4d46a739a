"""Models of other structures: graphs, sets, an actor with a critic, a hypernetwork."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from zoo.entry import SAMPLES, Entry, integers, normal


class MessagePassing(nnx.Module):
    """Each node adds up the messages of its incoming edges."""

    def __init__(self, width, rngs):
        self.message = nnx.Linear(2 * width, 2 * width, rngs=rngs)
        self.update = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, nodes, senders, receivers, edge_mask):
        def one_graph(nodes, senders, receivers, edge_mask):
            ends = jnp.concatenate([nodes[senders], nodes[receivers]], axis=-1)
            messages = nnx.relu(self.message(ends)) * edge_mask[:, None]
            return jax.ops.segment_sum(messages, receivers, num_segments=len(nodes))

        return nodes + self.update(jax.vmap(one_graph)(nodes, senders, receivers, edge_mask))


class GNN(nnx.Module):
    def __init__(self, rngs, width=16, depth=2):
        self.first = nnx.Linear(4, width, rngs=rngs)
        self.blocks = nnx.List([MessagePassing(width, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, batch):
        nodes = self.first(batch["nodes"])
        for block in self.blocks:
            nodes = block(nodes, batch["senders"], batch["receivers"], batch["edge_mask"])
        mask = batch["node_mask"][..., None]
        return self.head((nodes * mask).sum(1) / mask.sum(1))[:, 0]


def graph_loss(model, batch):
    return optax.huber_loss(model(batch), batch["target"]).mean()


def graphs(random, nodes=6, edges=10):
    count = random.integers(2, nodes + 1, size=(SAMPLES, 1))
    used = random.integers(1, edges + 1, size=(SAMPLES, 1))
    return {
        "nodes": normal(random, nodes, 4),
        "senders": (integers(random, nodes, edges) % count).astype(np.int32),
        "receivers": (integers(random, nodes, edges) % count).astype(np.int32),
        "node_mask": (np.arange(nodes) < count).astype(np.float32),
        "edge_mask": (np.arange(edges) < used).astype(np.float32),
        "target": normal(random),
    }


class AttentionBlock(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.attention = nnx.MultiHeadAttention(heads, width, rngs=rngs, decode=False)
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.body = nnx.Linear(width, width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, queries, x, mask=None):
        queries = self.norm1(queries + self.attention(queries, x, mask=mask))
        return self.norm2(queries + nnx.relu(self.body(queries)))


class SetTransformer(nnx.Module):
    """Pools a set of any size by the attention of a learned query."""

    def __init__(self, rngs, width=16, heads=4):
        self.first = nnx.Linear(4, width, rngs=rngs)
        self.encode = AttentionBlock(width, heads, rngs)
        self.seed = nnx.Param(jax.random.normal(rngs.params(), (1, width)))
        self.pool = AttentionBlock(width, heads, rngs)
        self.head = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x, mask):
        seen = mask[:, None, None, :] > 0
        x = self.first(x)
        x = self.encode(x, x, seen)
        seeds = jnp.broadcast_to(self.seed[...], (len(x), *self.seed.shape))
        return self.head(self.pool(seeds, x, seen))[:, 0, 0]


def set_loss(model, batch):
    return ((model(batch["nodes"], batch["node_mask"]) - batch["target"]) ** 2).mean()


class ActorCritic(nnx.Module):
    def __init__(self, rngs, actions=4):
        def network(outputs):
            return nnx.Sequential(
                nnx.Linear(8, 32, rngs=rngs),
                nnx.tanh,
                nnx.Linear(32, 32, rngs=rngs),
                nnx.tanh,
                nnx.Linear(32, outputs, rngs=rngs),
            )

        self.actor, self.critic = network(actions), network(1)


def actor_critic_loss(model, batch):
    log_policy = nnx.log_softmax(model.actor(batch["state"]))
    value = model.critic(batch["state"])[:, 0]
    advantage = jax.lax.stop_gradient(batch["returns"] - value)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    taken = jnp.take_along_axis(log_policy, batch["action"][:, None], axis=1)[:, 0]
    entropy = -(jnp.exp(log_policy) * log_policy).sum(-1).mean()
    policy_loss = -(taken * advantage).mean() - 0.01 * entropy
    value_loss = ((value - batch["returns"]) ** 2).mean()
    metrics = {"policy": policy_loss, "value": value_loss, "entropy": entropy}
    return policy_loss + value_loss, metrics


def played(random):
    state = normal(random, 8)
    return {"state": state, "action": integers(random, 4), "returns": normal(random)}


def by_network(params):
    return {name: jax.tree.map(lambda _, name=name: name, params[name]) for name in params}


class Hypernetwork(nnx.Module):
    """Makes the weights of a small network for each sample, from a few examples of its task."""

    def __init__(self, rngs, inputs=4, hidden=8):
        self.inputs, self.hidden = inputs, hidden
        self.context = nnx.Linear(inputs + 1, 32, rngs=rngs)
        self.kernel1 = nnx.Linear(32, inputs * hidden, rngs=rngs)
        self.bias1 = nnx.Linear(32, hidden, rngs=rngs)
        self.kernel2 = nnx.Linear(32, hidden, rngs=rngs)

    def __call__(self, shown, x):
        context = nnx.relu(self.context(shown)).mean(axis=1)
        kernel1 = self.kernel1(context).reshape(-1, self.inputs, self.hidden)
        hidden = nnx.tanh(x @ kernel1 + self.bias1(context)[:, None])
        return jnp.einsum("bnh,bh->bn", hidden, self.kernel2(context))


def task_loss(model, batch):
    return ((model(batch["shown"], batch["x"]) - batch["y"]) ** 2).mean()


def small_tasks(random):
    return {"shown": normal(random, 6, 5), "x": normal(random, 8, 4), "y": normal(random, 8)}


ZOO = {
    "graph network": Entry(GNN, graph_loss, graphs, blocks=True),
    "set transformer": Entry(SetTransformer, set_loss, graphs),
    "actor-critic": Entry(
        ActorCritic,
        actor_critic_loss,
        played,
        optax.multi_transform({"actor": optax.adam(1e-3), "critic": optax.sgd(1e-2)}, by_network),
    ),
    "hypernetwork": Entry(Hypernetwork, task_loss, small_tasks),
}
