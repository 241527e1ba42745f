# SPDX-License-Identifier: Apache-2.0
# Which rows ./test runs. --seconds keeps a slow machine inside the time limit: rows left out are counted
# in the output, and the shards start at different rows.
set(paths lsa)
marrow_conformance_test(conformance_pairs_0 ARGS --matrix pairwise --path ${paths} --shard 0/2 --seconds 50)
