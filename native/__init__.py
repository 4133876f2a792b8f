"""Numba kernels. All arithmetic is in integers with a total order, or in a fixed order: equal on every machine.

Names of arguments that mean the same in all kernels; where a docstring says nothing else, arrays have these shapes:

    costs           int64 (num_samples,) or (num_samples, num_phases), at least 0, with sums of at most 2**62
    descending      int64 (num_samples,), costs from the largest; a sample is then its position in that order
    sizes, caps     int64 (num_samples, num_caps) and (num_caps,): most that the sizes of a rank, or a cell, sum to;
                    of kernels that move samples: int64 (num_samples,), the price of moving each
    owner, rank     int32 (num_samples,), the rank of each sample; -1 for none. `owner` is changed in place
    loads, counts   int64 (num_ranks,) or (num_ranks, num_phases), and int32 (num_ranks,), of ranks; changed in place
    home            int32 (num_samples,), the rank that each sample is from
    given, within   int32 (num_samples,), assignments to start from
    pinned          int32 (num_samples,), the rank of a sample that stays there, as in its assignment, or -1
    limit, extras   most samples of a rank, and the number of ranks that may have one more; a limit of -1: swaps only
    limits          the same of each rank, int64 (num_ranks,)
    offsets         int64 (num_groups + 1,): group g has the entries from offsets[g] to offsets[g + 1]
    primary         index of the phase that all samples take part in
    target(s)       load, of each phase or column, at which a rank needs no more help
    ranks_per_node  consecutive ranks of a node; 1 where nodes do not matter
    tolerance       relative distance to the lower bound that is good enough
    budget          pairs of samples to look at, about: a bound on the work that is the same on every machine
    coefficients    quantised (linear, quadratic, constant, windows), from `CostModel.coefficients`
"""
