package testgpu

import (
	"strings"
	"sync"
	"testing"
)

// A process has 16 simulated libraries at a time. On a large machine more tests run in
// parallel, and a test that has one may want another: if each of 16 did, none would go on.
// So 6 tests at a time have libraries, two each, and one of them may have 4 more.
var share = struct {
	tests, many, kernels chan struct{} // one test at a time has Kernels
	mu                   sync.Mutex
	all, own             map[string]int // libraries of a top-level test with its subtests; of one test or subtest
}{make(chan struct{}, 6), make(chan struct{}, 1), make(chan struct{}, 1), sync.Mutex{}, make(map[string]int), make(map[string]int)}

const (
	maxPerTest = 2 // libraries of a test
	maxOwn     = 6 // libraries of the one test that may have more
)

// acquire waits until the test may have one more simulated library, until its end.
func acquire(tb testing.TB) {
	tb.Helper()
	name := tb.Name()
	top, _, _ := strings.Cut(name, "/")
	all, own := count(top, name, 1)
	if all == 1 {
		share.tests <- struct{}{}
	}
	if own == maxPerTest+1 {
		share.many <- struct{}{}
	}
	tb.Cleanup(func() {
		all, own := count(top, name, -1)
		if own == maxPerTest {
			<-share.many
		}
		if all == 0 {
			<-share.tests
		}
	})
	if own > maxOwn {
		tb.Fatalf("the test has %d simulated GPUs, and may have %d: a loop closes those of each turn by a subtest", own, maxOwn)
	}
}

func count(top, name string, more int) (all, own int) {
	share.mu.Lock()
	defer share.mu.Unlock()
	share.all[top] += more
	share.own[name] += more
	return share.all[top], share.own[name]
}
