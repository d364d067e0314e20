// PyTorch's and DeepSpeed's ways of pinning, as rows of the experiment memory. They run in processes of a Python that the
// user has named: no other is started.

package bench

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/gopinned/pinned/internal/bounded"
)

// The methods of Python.
const (
	byTorch     = "pytorch"
	byDeepSpeed = "deepspeed"
)

// pythonTime is what a process takes to import PyTorch and to open CUDA, for estimates.
const pythonTime = 8 * time.Second

//go:embed torch.py
var torchScript string

// inPython returns a function that has a Python keep memory, instead of a child of this program. Its error wraps
// errors.ErrUnsupported where there is no PyTorch or DeepSpeed, or no GPU for it.
func inPython(python string) func(context.Context, time.Duration, keepRequest) (keepReply, error) {
	return func(ctx context.Context, limit time.Duration, r keepRequest) (keepReply, error) {
		failed := func(err error) (keepReply, error) { return keepReply{}, fmt.Errorf("%s: %w", python, err) }
		limited, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		cmd := exec.CommandContext(limited, python, "-c", torchScript, r.Allocator, strconv.Itoa(r.Size), strconv.Itoa(r.Count))
		cmd.WaitDelay = time.Second // of what it started itself
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		switch {
		case ctx.Err() != nil:
			return keepReply{}, bounded.Ended(ctx)
		case limited.Err() != nil:
			return failed(fmt.Errorf("no answer within %v", limit))
		case err != nil:
			return failed(fmt.Errorf("%w: %s", err, lastLine(stderr.String())))
		}
		var reply struct {
			Retained                 int
			Missing, Error, Mismatch string
		}
		switch err := json.Unmarshal([]byte(lastLine(string(out))), &reply); { // libraries print before it
		case err != nil:
			return failed(fmt.Errorf("answer %.200q: %w", out, err))
		case reply.Missing != "":
			return failed(fmt.Errorf("%s: %w", reply.Missing, errors.ErrUnsupported))
		case reply.Error != "":
			return failed(errors.New(reply.Error))
		}
		return keepReply{Retained: reply.Retained, Mismatch: reply.Mismatch}, nil
	}
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}
