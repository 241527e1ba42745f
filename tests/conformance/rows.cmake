# SPDX-License-Identifier: Apache-2.0
# Which rows ./test runs. --seconds keeps a slow machine inside the time limit: rows left out are counted
# in the output.

# All windows and buffers as if no network reached them, as GPU memory may be: through staging slots, small puts
# written there by the kernel.
set(staged MARROW_PROXY_STAGE=always MARROW_PROXY_STAGE_BYTES=1M MARROW_PROXY_STAGE_KERNEL_BYTES=1K)
if(MARROW_SANITIZE STREQUAL "thread")
  # Processes are invisible to ThreadSanitizer: ranks as threads, on the paths that are ours from end to end.
  foreach(path IN ITEMS lsa gda proxy mixed)
    marrow_conformance_test(conformance_tsan_${path} ARGS --matrix pairwise --as threads --path ${path}
      --ranks 2,3 --block 1,4 --lanes 1,4 --seed 1,2 --bytes 256,15,4096 --far 0 --delay 0,20
      --index start,wrap16 --seconds 25)
  endforeach()
  marrow_conformance_test(conformance_tsan_verbs ARGS --matrix pairwise --as threads --path proxy
    --network verbs --ranks 2,3 --block 1,4 --lanes 1 --seed 1 --bytes 256,15,4096 --far 0 --delay 0,20
    --seconds 12)
  marrow_conformance_test(conformance_tsan_staged ENVIRONMENT ${staged} ARGS --matrix pairwise --as threads
    --path proxy --ranks 2,3 --block 1,4 --lanes 1,4 --seed 1,2 --bytes 256,15,4096 --far 0 --delay 0,20 --seconds 9)
  return()
elseif(MARROW_SANITIZE STREQUAL "address")
  foreach(shard RANGE 1)
    marrow_conformance_test(conformance_asan_${shard} ARGS --matrix pairwise --ranks 1,2,3 --far 0
      --shard ${shard}/2 --seconds 25)
  endforeach()
  marrow_conformance_test(conformance_asan_verbs ARGS --matrix pairwise --path proxy --network verbs
    --ranks 1,2,3 --far 0 --seconds 10)
  marrow_conformance_test(conformance_asan_staged ENVIRONMENT ${staged} ARGS --matrix pairwise --path proxy,mixed
    --ranks 1,2,3 --far 0 --seconds 6)
  return()
endif()

# A row that fails, hangs or dies is named, is tried alone, and costs the others nothing.
marrow_conformance_test(conformance_driver ARGS --matrix full --path lsa --ranks 2 --as threads,processes
  --block 1 --lanes 1 --group block --bytes 256 --row-seconds 4 --verbose
  --case put_signal,goes_wrong,goes_on,dies,signal_at)
set_tests_properties(conformance_driver PROPERTIES PASS_REGULAR_EXPRESSION "4 passed, 6 failed")

# Each pair of values, twice over: two coverings share few rows.
foreach(seed RANGE 1 2)
  foreach(shard RANGE 2)
    marrow_conformance_test(conformance_pairs_${seed}_${shard} ARGS --matrix pairwise --matrix-seed ${seed}
      --shard ${shard}/3 --seconds 50)
  endforeach()
endforeach()
# The proxy path over the verbs network, whose NIC is softnic.
foreach(as IN ITEMS threads processes)
  marrow_conformance_test(conformance_verbs_${as} ARGS --matrix pairwise --path proxy --network verbs
    --as ${as} --seconds 10)
endforeach()
marrow_conformance_test(conformance_staged ENVIRONMENT ${staged} ARGS --matrix pairwise --path proxy,mixed --seconds 8)
marrow_conformance_test(conformance_verbs_staged ENVIRONMENT ${staged} ARGS --matrix pairwise --matrix-seed 3 --path proxy
  --network verbs --seconds 3)
# RoCE addressing: both paths that drive a NIC, on softnic's RoCE port.
foreach(path IN ITEMS "gda" "proxy;--network;verbs")
  list(GET path 0 name)
  marrow_conformance_test(conformance_roce_${name} ARGS --matrix pairwise --path ${path} --softnic port=roce
    --ranks 2,3 --case put_signal,get_flush,fetch_add,flush_remote,counter_shared --far 0 --seconds 5)
endforeach()
# A slot used a thousand times, with random pauses and, where there are queues, small ones.
foreach(path IN ITEMS lsa gda proxy)
  foreach(case IN ITEMS put_signal flush_reuse packets)
    set(depth 32)
    if(path STREQUAL "lsa")
      set(depth 0)
    endif()
    marrow_conformance_test(conformance_reuse_${path}_${case} ARGS --case ${case} --path ${path} --ranks 2
      --iterations 1000 --delay 20 --depth ${depth} --row-seconds 55)
  endforeach()
endforeach()
# Three peers on three paths add a million each to one signal: no update is lost.
marrow_conformance_test(conformance_exact_sum ARGS --case exact_sum --path mixed --ranks 4 --seed 0
  --count 1000000 --sharing thread)
marrow_conformance_test(conformance_exact_sum_hca ARGS --case exact_sum --path mixed --ranks 4 --seed 0
  --count 1000000 --sharing thread --softnic atomics=hca)

marrow_conformance_test(conformance_full LABEL full TIMEOUT 3600 ARGS --matrix full --seconds 1800)

if(MARROW_WITH_CUDA)
  # Two ranks a GPU as threads, then one process a GPU; windows in the memory that each path can use.
  marrow_conformance_test(conformance_gpu_lsa LABEL gpu BINARY marrow_conformance_gpu ARGS --matrix pairwise
    --path lsa --seconds 50)
  marrow_conformance_test(conformance_gpu_host LABEL gpu BINARY marrow_conformance_gpu ARGS --matrix pairwise
    --path gda,proxy --memory host --seconds 50)
  marrow_conformance_test(conformance_gpu_engine LABEL gpu BINARY marrow_conformance_gpu ARGS --matrix pairwise
    --path gda --memory device --seconds 50)
  marrow_conformance_test(conformance_gpu_staged LABEL gpu BINARY marrow_conformance_gpu
    ENVIRONMENT MARROW_PROXY_STAGE=always ARGS --matrix pairwise --path proxy --memory device --seconds 50)
endif()
