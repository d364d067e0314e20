package transfer

import (
	"context"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// stageUp copies a feed to one place on the device, through the ring.
func (v *View) stageUp(ctx context.Context, dst cudart.DevPtr, c stage.Copy) (int, error) {
	c.Queue = func(on *cudart.Stream, _ int, mem []byte, off int) error {
		return on.CopyToDevice(dst+cudart.DevPtr(off), unsafe.Pointer(&mem[0]), len(mem))
	}
	return v.stageRun(ctx, c)
}

// stageDown copies from one place on the device to a sink, through the ring.
func (v *View) stageDown(ctx context.Context, src cudart.DevPtr, c stage.Copy) (int, error) {
	c.Down = true
	c.Queue = func(on *cudart.Stream, _ int, mem []byte, off int) error {
		return on.CopyToHost(unsafe.Pointer(&mem[0]), src+cudart.DevPtr(off), len(mem))
	}
	return v.stageRun(ctx, c)
}

func (v *View) stageRun(ctx context.Context, c stage.Copy) (int, error) {
	c.Progress = v.call.Progress
	if v.o.Workers > 0 {
		c.Workers = v.o.Workers
	}
	return v.staged(v.stage.Run(ctx, c))
}

// staged counts bytes that went through the ring.
func (v *View) staged(done int, err error) (int, error) {
	v.stats.stagedBytes.Add(int64(done))
	return done, err
}
