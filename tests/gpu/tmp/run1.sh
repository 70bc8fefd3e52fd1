N="nvcc -O3 -std=c++17 -arch=sm_90 -I."
B=/tmp/dg; mkdir -p $B
($N -c tests/gpu/decode_graph.cu -o $B/h.o; ) &
($N -c tests/gpu/tmp/decode_old.cu -o $B/old.o) &
for s in 0 1 2 3 9; do $N -DSTAGE=$s -c cuda/decode.cu -o $B/s$s.o & done
$N -DBLOCKS16=4 -c cuda/decode.cu -o $B/b4.o &
$N -DSTAMPS tests/gpu/decode_graph.cu cuda/decode.cu -o $B/stamps &
wait
for x in old s0 s1 s2 s3 s9 b4; do nvcc -arch=sm_90 $B/h.o $B/$x.o -o $B/$x & done; wait
for x in old s0 s1 s2 s3; do echo "== $x"; $B/$x; done
echo "== b4"; $B/b4 +LANES=16
echo "== s9"; $B/s9 "" ORDER=0 AHEAD=0 STREAMING=0 -LANES=16 +LANES=8 +LANES=16 +LANES=32 +LANES=32,ORDER=0 +LANES=32,CLUSTER=4 +LANES=16,CLUSTER=8 +LANES=32,STREAMING=0
echo "== stamps"; $B/stamps "" | grep .
