package hosttest

import (
	"context"
	"os"
	"os/exec"
	"runtime"
	"testing"
)

// emulator is the program that runs this test's program, and others for the same architecture, where the machine does not:
// qemu-user, of the step arm64 of scripts/check.sh.
var emulator = os.Getenv("PINNED_TEST_EXEC")

// Command is [exec.CommandContext] of a program for this architecture, run by the emulator if this test is.
func Command(ctx context.Context, program string, args ...string) *exec.Cmd {
	if emulator != "" {
		program, args = emulator, append([]string{program}, args...)
	}
	return exec.CommandContext(ctx, program, args...)
}

// Emulated skips a test under the emulator, and says why.
func Emulated(tb testing.TB, why string) {
	tb.Helper()
	if emulator != "" {
		tb.Skip(why)
	}
}

// StartsPrograms skips, under the emulator, a test of code that starts programs for this architecture itself, or files that
// cannot be executed. If qemu 7.2 cannot execute a file, its process does not always end, and the test would wait forever.
func StartsPrograms(tb testing.TB) {
	tb.Helper()
	Emulated(tb, "programs for "+runtime.GOARCH+" cannot be started directly (qemu-user without binfmt_misc)")
}
