package main

import (
	"container/list"
	"context"
	"errors"
	"fmt"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/transfer/blocks"
)

// A cache has blocks of one size, each with a place in pinned memory, and slots on the device for some of them. The
// blocks that were used least recently are spilled. After an error it is of no use but to be closed.
type cache struct {
	stream *cudart.Stream
	size   int // bytes of a block
	blocks []block
	host   *hostmem.Buffer // block i at i*size
	device *cudart.DeviceMemory
	copier *blocks.Copier
	recent *list.List // of slots, the most recently used one first
	stats  stats
}

// A block is on the device if it has a slot.
type block struct {
	slot  *list.Element // its value is a *slot; nil for none
	saved bool          // the pinned memory has what the device has, or had
	made  bool          // it has content somewhere
}

// A slot is a place on the device.
type slot struct {
	at    uint32
	block int // -1 for none
}

// stats counts copies.
type stats struct{ restored, spilled int } // blocks

// newCache allocates memory for count blocks, and slots on the device for as many of them as said.
func newCache(ctx context.Context, dev *cudart.Device, count, size, slots int) (*cache, error) {
	c := &cache{size: size, blocks: make([]block, count), recent: list.New()}
	for i := range slots {
		c.recent.PushBack(&slot{uint32(i), -1})
	}
	if err := c.open(ctx, dev); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (c *cache) open(ctx context.Context, dev *cudart.Device) (err error) {
	if c.stream, err = dev.NewStream(cudart.StreamOptions{}); err != nil {
		return err
	}
	if c.device, err = dev.Alloc(c.recent.Len() * c.size); err != nil {
		return err
	}
	if c.host, err = hostmem.Alloc(ctx, dev, len(c.blocks)*c.size, hostmem.Options{Label: "kvcache"}); err != nil {
		return err
	}
	c.copier, err = blocks.New(ctx, dev, blocks.Options{})
	return err
}

// Close waits for what was queued, and releases all.
func (c *cache) Close() error {
	var errs []error
	if c.copier != nil {
		errs = append(errs, c.stream.Synchronize(context.Background()), c.copier.Close())
	}
	if c.host != nil {
		errs = append(errs, c.host.Close())
	}
	if c.device != nil {
		errs = append(errs, c.device.Close())
	}
	if c.stream != nil {
		errs = append(errs, c.stream.Close())
	}
	return errors.Join(errs...)
}

// get brings blocks to the device, instead of those that were used least recently, and returns how many it
// brought back when they have arrived. None may be there twice, and there must be slots for all.
func (c *cache) get(ctx context.Context, wanted []int) (restored int, err error) {
	var missing []int
	for _, b := range wanted { // what is there must stay
		if e := c.blocks[b].slot; e != nil {
			c.recent.MoveToFront(e)
		} else {
			missing = append(missing, b)
		}
	}
	if len(missing) == 0 {
		return 0, nil
	}
	var spill, restore blocks.Copy
	for _, b := range missing {
		e := c.recent.Back()
		s := e.Value.(*slot)
		if old := s.block; old >= 0 {
			if !c.blocks[old].saved {
				spill.HostIndex, spill.DeviceIndex = append(spill.HostIndex, uint32(old)), append(spill.DeviceIndex, s.at)
				c.blocks[old].saved = true
			}
			c.blocks[old].slot = nil
		}
		s.block, c.blocks[b].slot = b, e
		c.recent.MoveToFront(e)
		if c.blocks[b].made {
			restore.HostIndex, restore.DeviceIndex = append(restore.HostIndex, uint32(b)), append(restore.DeviceIndex, s.at)
		}
	}
	for _, copies := range []*blocks.Copy{&spill, &restore} {
		copies.Host, copies.Device, copies.DeviceLen = c.host.Bytes(), c.device.Ptr(), c.device.Len()
		copies.Size, copies.Count = c.size, len(copies.HostIndex)
	}
	// The stream keeps the order: what is spilled has left its slots when others arrive there.
	if _, err = c.copier.CopyToHost(ctx, c.stream, spill); err != nil {
		return 0, err
	}
	arrived, err := c.copier.CopyToDevice(ctx, c.stream, restore)
	if err != nil {
		return 0, err
	}
	c.stats.spilled, c.stats.restored = c.stats.spilled+spill.Count, c.stats.restored+restore.Count
	return restore.Count, arrived.Wait(ctx)
}

// ptr returns where a block is on the device.
func (c *cache) ptr(b int) (cudart.DevPtr, error) {
	if c.blocks[b].slot == nil {
		return 0, fmt.Errorf("block %d is not on the device", b)
	}
	return c.device.Range(int(c.blocks[b].slot.Value.(*slot).at)*c.size, c.size)
}

// write returns where a block is on the device for work of the cache's stream that changes it.
func (c *cache) write(b int) (cudart.DevPtr, error) {
	p, err := c.ptr(b)
	if err == nil {
		c.blocks[b].made, c.blocks[b].saved = true, false
	}
	return p, err
}

// spilled returns the content of a block that is not on the device.
func (c *cache) spilled(b int) []byte { return c.host.Bytes()[b*c.size:][:c.size] }
