"""Arrays under `jax.shard_map(check_vma=True)`, whose types say over which axes a value varies."""

import jax


def vary_together[Tree](tree: Tree) -> Tree:
    """The same arrays, each typed as varying over every manual axis that any of them varies over.

    A scan's carry and a custom VJP's cotangents then have one type throughout, and the transpose
    of this cast is the sum that a replicated parameter's gradient needs. Outside `shard_map` there
    are no such axes and nothing happens.
    """
    axes = frozenset().union(
        *(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree))
    )

    def cast(x: jax.Array) -> jax.Array:
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, tree)
