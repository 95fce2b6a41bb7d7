"""Operations on arrays, each with one oracle and several implementations.

This floor takes arrays and gives arrays: it imports jax (and triton, lazily), knows no mesh axis
and nothing of `k3jax`. Each operation is a package; `dispatch` says which implementation of it
takes a call.
"""
