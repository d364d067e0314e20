package transfer

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// cutUp returns the n bytes of host and device as parts of sizes in turn, in
// another order on either side, with a gap after each on the device if gap.
func cutUp(host []byte, dev cudart.DevPtr, gap int, sizes ...int) []Part {
	var parts []Part
	at := 0
	for i := 0; len(host) > 0; i++ {
		n := min(sizes[i%len(sizes)], len(host))
		parts = append(parts, Part{Device: dev + cudart.DevPtr(at), Host: host[:n:n]})
		host, at = host[n:], at+n+gap
	}
	return parts
}

func TestScatteredParts(t *testing.T) {
	t.Parallel()
	for _, v := range []cudart.Version{11080, 12080, 13000} {
		t.Run(v.String(), func(t *testing.T) {
			t.Parallel()
			dev := testgpu.Device(t)
			if !testgpu.Real() {
				_, rt := testgpu.Sim(t, cudasim.Config{Version: v})
				var err error
				dev, err = rt.Device(0)
				require.NoError(t, err)
			}
			r := fixtureOn(t, dev, Options{Workers: 3})
			for _, gap := range []int{0, 3} {
				for _, cut := range [][]int{{4096}, {1, 0, 100, 65536}, {3 * mib}, {mib, 7}} {
					t.Run(fmt.Sprintf("gap %d, %v", gap, cut), func(t *testing.T) {
						const n = 5*mib + 5
						want := bytesOf(9, n)
						capacity := 2*n + 1000 // for the gaps
						if gap > 0 && cut[0] == 1 {
							capacity = n + 4*gap*(n/65536+4)
						}
						mem := r.device(capacity)
						r.fill(mem, make([]byte, capacity))
						parts := cutUp(want, mem, gap, cut...)
						rand.New(rand.NewPCG(1, 2)).Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
						require.NoError(t, r.c.UploadAll(t.Context(), parts))
						there := r.onDevice(mem, capacity)
						back := make([]Part, len(parts))
						for i, p := range parts {
							at := int(p.Device - mem)
							if !bytes.Equal(p.Host, there[at:at+len(p.Host)]) {
								t.Fatalf("part %d of %d bytes differs on the device", i, len(p.Host))
							}
							clear(there[at : at+len(p.Host)])
							back[i] = Part{Device: p.Device, Host: make([]byte, len(p.Host))}
						}
						require.True(t, bytes.Equal(make([]byte, capacity), there), "nothing between the parts is touched")
						require.NoError(t, r.c.DownloadAll(t.Context(), back))
						for i, p := range parts {
							if !bytes.Equal(p.Host, back[i].Host) {
								t.Fatalf("part %d of %d bytes differs when it is back", i, len(p.Host))
							}
						}
					})
				}
			}
		})
	}
}

func TestNeighboursBecomeOneCopy(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Version: 12040}) // which copies them one by one
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{Workers: 1})
	mem := r.device(mib)
	for parts, want := range map[[2]int][2]int{{100, 0}: {1, 0}, {100, 1}: {0, 1}, {50, 1}: {50, 0}} { // number and gap; copies and kernels
		copies, kernels := sim.Calls("cudaMemcpyAsync"), sim.Calls("cuLaunchKernel")
		require.NoError(t, r.c.UploadAll(t.Context(), cutUp(make([]byte, parts[0]*4096), mem, parts[1], 4096)))
		require.Equal(t, want, [2]int{sim.Calls("cudaMemcpyAsync") - copies, sim.Calls("cuLaunchKernel") - kernels}, "%d parts, gap %d", parts[0], parts[1])
	}
}

// Of many small parts one has an address that is not of the device, or ends beyond its allocation: the error is
// that of a copy engine, nothing is launched, and the device copies on.
func TestAWrongAddressAmongManyParts(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	r := fixtureOn(t, dev, Options{Workers: 1})
	const size, n = 4096, 200
	mem, small := r.device(2*n*size), r.device(1024)
	for _, count := range []int{minScattered - 1, n} {
		wrong := small // which ends within the part
		if testgpu.Real() {
			wrong = mem + 1<<45 // the simulator takes that for memory of the host
		}
		for _, all := range []func(context.Context, []Part) error{r.c.UploadAll, r.c.DownloadAll} {
			parts := cutUp(make([]byte, count*size), mem, 1, size)
			parts[count/2].Device = wrong
			err := all(t.Context(), parts)
			require.ErrorIs(t, err, cudart.ErrInvalidValue, "%d parts", count)
			parts[count/2].Device = ^cudart.DevPtr(3)
			err = all(t.Context(), parts)
			require.ErrorContains(t, err, fmt.Sprintf("part %d: 4096 bytes at 0xfffffffffffffffc: no memory has such addresses", count/2))
			require.NoError(t, r.c.Upload(t.Context(), mem, make([]byte, 100)), "the context lives")
		}
	}
}
