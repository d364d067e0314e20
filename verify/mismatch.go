package verify

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"github.com/gopinned/pinned/internal/units"
)

// ErrMismatch is what [Report.Err] wraps when bytes came back wrong.
var ErrMismatch = errors.New("bytes came back wrong")

// Mismatch is a case whose bytes came back wrong, with all that they show.
type Mismatch struct {
	// Case is the round trip.
	Case
	// Difference is how the bytes differ.
	Difference
}

// String returns the mismatch in one line.
func (m Mismatch) String() string {
	return m.Case.String() + ": " + m.Difference.describe(m.SizeBytes)
}

// Cause is a kind of wrong bytes. Unknown is the empty string.
type Cause string

const (
	// CauseStale is the poison laid before the copy: the copy did not arrive.
	CauseStale Cause = "stale"
	// CauseShifted is the right bytes of another offset.
	CauseShifted Cause = "shifted"
	// CauseConstant is one value everywhere.
	CauseConstant Cause = "constant"
	// CauseOverrun is bytes outside the target that were written.
	CauseOverrun Cause = "overrun"
	// CauseRead is bytes that a kernel on the device read wrong, and that are right when they
	// are copied to the host. Found is empty.
	CauseRead Cause = "read"
)

// Difference is how found bytes differ from expected ones.
type Difference struct {
	// FirstBadOffsetBytes is that of the first wrong byte in the copy. In an
	// overrun it is negative before the target, and the size or more after it.
	FirstBadOffsetBytes int `json:"first_bad_offset_bytes"`
	// LastBadOffsetBytes is that of the last wrong byte.
	LastBadOffsetBytes int `json:"last_bad_offset_bytes"`
	// Expected is what up to 16 bytes from the first wrong one should be.
	Expected Hex `json:"expected_hex"`
	// Found is what they are.
	Found Hex `json:"found_hex"`
	// BadBytes counts the wrong bytes.
	BadBytes int `json:"bad_bytes"`
	// BadBits counts the wrong bits.
	BadBits int `json:"bad_bits"`
	// Regions counts the wrong stretches; stretches less than 8 bytes apart are one.
	Regions int `json:"bad_regions"`
	// PageBytes is the page size at whose edges every region starts and ends
	// (4 KiB, 64 KiB or 2 MiB), 0 when there is none.
	PageBytes int `json:"page_bytes,omitempty"`
	// PageOf is the address that PageBytes counts from: PageOfSource,
	// PageOfDevice or PageOfReturn.
	PageOf string `json:"page_of,omitempty"`
	// StrideBytes is the distance between the starts of wrong stretches that have one
	// distance and one length; 0 when they do not.
	StrideBytes int `json:"stride_bytes,omitempty"`
	// StrideRunBytes is that length.
	StrideRunBytes int `json:"stride_run_bytes,omitempty"`
	// Cause is the kind of the wrong bytes.
	Cause Cause `json:"cause,omitempty"`
	// At names the target that kept its stale bytes, was overrun or read wrong: AtDevice (by
	// an upload), AtHop (by a copy on the device), AtPeer (by one to another
	// device) or AtReturn (by a download);
	// stale bytes of several are joined by commas.
	At string `json:"at,omitempty"`
	// ShiftBytes is how much later than it belongs every wrong byte is:
	// found[i] = expected[i-ShiftBytes].
	ShiftBytes int `json:"shift_bytes,omitempty"`
}

const (
	// AtDevice is the memory on the device that an upload writes.
	AtDevice = "device"
	// AtHop is the memory on the device that a copy on the device writes.
	AtHop = "second device buffer"
	// AtPeer is the memory on another device.
	AtPeer = "other device"
	// AtSource is the host memory that is sent.
	AtSource = "source host buffer"
	// AtReturn is the host memory that a download writes.
	AtReturn = "returning host buffer"
)

const (
	// PageOfSource is the address of the host memory that is sent.
	PageOfSource = "source host address"
	// PageOfDevice is the address of the memory on the device.
	PageOfDevice = "device address"
	// PageOfReturn is the address of the host memory that receives.
	PageOfReturn = "returning host address"
)

// Hex is a few bytes, in JSON as hexadecimal digits.
type Hex []byte

// String returns the bytes as pairs of digits with spaces between.
func (h Hex) String() string { return fmt.Sprintf("% x", []byte(h)) }

// MarshalText returns hexadecimal digits.
func (h Hex) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, h), nil }

// UnmarshalText reads hexadecimal digits.
func (h *Hex) UnmarshalText(text []byte) (err error) {
	*h, err = hex.AppendDecode(nil, text)
	return err
}

func (d Difference) describe(size int) string {
	var b strings.Builder
	if d.Cause == CauseOverrun {
		fmt.Fprintf(&b, "%d bytes outside the %s's target written, from offset %d", d.BadBytes, d.At, d.FirstBadOffsetBytes)
	} else {
		fmt.Fprintf(&b, "%d of %d bytes wrong, the first at offset %d", d.BadBytes, size, d.FirstBadOffsetBytes)
	}
	if d.Cause == CauseRead {
		fmt.Fprintf(&b, ", as a kernel reads the %s: expected %v; copied to the host they are right", d.At, d.Expected)
		return b.String()
	}
	fmt.Fprintf(&b, ": expected %v, found %v", d.Expected, d.Found)
	switch {
	case d.BadBits == 1:
		b.WriteString("; a single bit")
	case d.Regions > 1:
		fmt.Fprintf(&b, "; %d stretches", d.Regions)
	}
	if d.StrideBytes > 0 {
		fmt.Fprintf(&b, "; %s every %s", units.ExactBytes(d.StrideRunBytes), units.ExactBytes(d.StrideBytes))
	}
	if d.PageBytes > 0 {
		fmt.Fprintf(&b, "; follows %s pages of the %s", units.ExactBytes(d.PageBytes), d.PageOf)
	}
	switch d.Cause {
	case CauseStale:
		fmt.Fprintf(&b, "; stale: %s did not arrive", staleText(d.At))
	case CauseShifted:
		way, k := "later", d.ShiftBytes
		if k < 0 {
			way, k = "earlier", -k
		}
		fmt.Fprintf(&b, "; the right bytes, but %s %s than they belong", units.ExactBytes(k), way)
	case CauseConstant:
		fmt.Fprintf(&b, "; every wrong byte is 0x%02x", d.Found[0])
	}
	return b.String()
}

func staleText(at string) string {
	for _, p := range poisons {
		if p.at == at {
			return p.copy
		}
	}
	return "copies (" + at + ")"
}
