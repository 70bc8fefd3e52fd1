N="nvcc -O3 -std=c++17 -arch=sm_90 -I. -diag-suppress 128"
B=/tmp/dg2; mkdir -p $B
$N -c tests/gpu/decode_graph.cu -o $B/h.o &
for s in 0 3 9; do $N -DSTAGE=$s -c cuda/decode.cu -o $B/s$s.o & done
$N -DSTAMPS tests/gpu/decode_graph.cu cuda/decode.cu -o $B/stamps &
$N -DSTAMPS -DTWICE tests/gpu/decode_graph.cu cuda/decode.cu -o $B/twice &
wait
for x in s0 s3 s9; do nvcc -arch=sm_90 $B/h.o $B/$x.o -o $B/$x & done; wait
echo "== s0"; $B/s0 ROWS=4 ROWS=8 -ROWS=16
echo "== s3"; $B/s3 ROWS=4 ROWS=8 -ROWS=16
echo "== s9"; $B/s9 -LANES=8 -LANES=16 -LANES=32 -ROWS=4 ROWS=8 ROWS=16 +LANES=16 +LANES=32 +ROWS=4 +ROWS=4,AHEAD=0
echo "== s9, an eighth of the slots"; SHRINK=8 $B/s9 -LANES=8 -LANES=16 -ROWS=8 -ROWS=16 +LANES=32 +ROWS=4
echo "== stamps"; $B/stamps -ROWS=8 -ROWS=16 +ROWS=4 -LANES=16 | grep .
echo "== twice"; $B/twice -LANES=8 | grep .
