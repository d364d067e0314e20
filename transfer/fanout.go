package transfer

import (
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/gopinned/pinned/cudart"
)

// A Fanout copies one source onto several devices, and reads it once.
//
// Devices that can access each other's memory share the work: each of n devices gets
// every n-th chunk over its own link, and passes it on to the other devices
// (cudaMemcpyPeerAsync, over NVLink or PCI Express). So two devices get the whole
// source in half the time that one takes. Where there is no peer access, and where
// copies between devices do not arrive, each chunk goes to all devices from the same
// pinned memory, each over its own link, in the time that one device takes.
//
// For all methods that copy: dsts are addresses, one for each device in the order of
// NewFanout, with room for all the bytes. They must not overlap. A copy is complete
// when its method returns: all bytes are on all devices. After an error the bytes
// before the returned count have arrived; later bytes may have arrived on some devices.
// The error names the device that failed, and no device copies any more, unless the
// error wraps [ErrUnderWay]. ctx and a reader must not be nil, and sizes are bytes, 0 or
// more. A copy of no bytes succeeds at once. Other errors are those of ctx (its error and
// its cause), of the reader, of CUDA, and [cudart.ErrClosed].
type Fanout struct{ view }

// NewFanout returns a Fanout for devices of one CUDA library, each of them once. It uses the rings
// that the Copiers of these devices share, and allocates those that are missing, 39 MiB a device at
// most. It enables peer access in both directions between those that can have it
// (cudaDeviceEnablePeerAccess); access that other code of the process has enabled is used, and
// stays enabled. Errors are those of [NewCopier] and of CUDA's calls for peer access and its proof;
// a duplicate device, and devices of different libraries, are errors too. After an error nothing
// stays allocated, unless the error reports memory that could not be released.
//
// CUDA reports peer access, and copies succeed, on hosts where an IOMMU or ACS keeps the bytes from
// arriving. So the first NewFanout of a process and a cudart.Runtime that connects two devices
// proves both directions: it copies 16 KiB from one device to the other, over bytes that differ
// from them, and reads them back through the host. It waits for work of the devices, as cudaMemcpy
// and cudaFree do. On idle devices it takes one to two milliseconds for a pair: 1.35 ms on two
// H100s (2026-11-27). If a byte is wrong in either direction, the two devices do not copy to each
// other, each uses its own link, and Notes reports it. The result holds for all later Fanouts. If a
// device has no memory for the proof, Notes reports that too, and the next NewFanout tries again.
// With [Options].NoPeers there are no copies from device to device, and no proof.
//
// Options.Workers is for all devices together.
func NewFanout(ctx context.Context, devs []*cudart.Device, o Options) (*Fanout, error) {
	e, err := newEngine(ctx, fmt.Sprintf("fanout on %d devices", len(devs)), devs, o)
	if err != nil {
		return nil, err
	}
	return &Fanout{view{engine: e}}, nil
}

// Close releases the Fanout: it disables the peer access that NewFanout enabled, and releases the
// rings of devices that no Copier uses. After the call of Close, new copies return
// [cudart.ErrClosed]. While methods run, Close returns an error instead of waiting, because one of
// their callbacks may have called it. CloseContext waits for them. After an error Close may be
// called again; once it has returned nil it does nothing.
func (f *Fanout) Close() error { return f.get().close() }

// CloseContext is Close that also waits for running methods, until ctx ends: then it returns ctx's
// error. It waits one more second for a call into CUDA that does not return.
func (f *Fanout) CloseContext(ctx context.Context) error { return f.get().closeContext(ctx) }

func (f *Fanout) get() view {
	if f == nil {
		return view{}
	}
	return f.view
}

// Notes returns, in words, why devices that could access each other's memory do not pass bytes
// on: a proof showed that copies between them do not arrive. It is nil if there is nothing to
// report. It does not block.
func (f *Fanout) Notes() []string {
	if e := f.get().engine; e != nil {
		return slices.Clone(e.notes)
	}
	return nil
}

// With returns the same Fanout, whose copies are configured by call: a Close of either closes both.
// It does not block. Call.Stream may belong to any of the devices: a copy begins when the work that
// was queued there is done. If work on other devices must be done before, make that stream wait for
// it ([cudart.Stream.WaitPoint]).
func (f *Fanout) With(call Call) *Fanout { return &Fanout{view{f.get().engine, call}} }

// Stats returns the counts so far. Each byte of a source
// counts once, and in PeerBytes once for each device that got it from another device.
// RingBytes are those of all devices. It does not block.
func (f *Fanout) Stats() Stats { return f.get().readStats() }

// Upload copies src, which may be any memory, to all devices.
func (f *Fanout) Upload(ctx context.Context, dsts []cudart.DevPtr, src []byte) error {
	p := f.get().at(len(src), dsts...)
	_, err := p.do(ctx, len(src), func() (int, error) { return p.memory(ctx, src) })
	if err != nil {
		return fmt.Errorf("transfer: upload %d bytes%s: %w", len(src), p.onto(), err)
	}
	return nil
}

// UploadFrom copies n bytes from offset off of r to all devices. It returns the number of
// bytes, from the first on, that arrived on all devices. r is read as [Copier.UploadFrom] does.
func (f *Fanout) UploadFrom(ctx context.Context, dsts []cudart.DevPtr, r io.ReaderAt, off int64, n int) (int, error) {
	return f.get().at(n, dsts...).uploadFrom(ctx, r, off, n)
}

// UploadReader copies the next n bytes of r to all devices. It returns the number of bytes,
// from the first on, that arrived on all devices. r is read as [Copier.UploadReader] does.
func (f *Fanout) UploadReader(ctx context.Context, dsts []cudart.DevPtr, r io.Reader, n int) (int, error) {
	return f.get().at(n, dsts...).uploadReader(ctx, r, n)
}
