package verify

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"github.com/gopinned/pinned/internal/units"
)

// ErrMismatch is wrapped by the error of [Report.Err] if bytes differ from the expected ones.
var ErrMismatch = errors.New("mismatch")

// A Mismatch is a case with bytes that differ from the expected ones.
type Mismatch struct {
	// Case is the round trip.
	Case
	// Difference is how the bytes differ.
	Difference
}

// String returns the mismatch in one line.
func (m Mismatch) String() string {
	s := m.Case.String() + ": " + m.Difference.describe(m.SizeBytes)
	if m.Path == PathPeer && m.Cause != CauseOverrun {
		s += "; if other paths are right, the path between the GPUs loses them: an IOMMU that translates (iommu=pt ends that) or access control (ACS) of a PCI Express bridge"
	}
	return s
}

// A Cause classifies a mismatch by its bytes. Empty stands for an unknown one.
type Cause string

const (
	// CauseStale: the bytes are the poison written before the copy. The copy did not arrive.
	CauseStale Cause = "stale"
	// CauseShifted: the bytes are the expected ones of another offset.
	CauseShifted Cause = "shifted"
	// CauseConstant: all mismatched bytes have one value.
	CauseConstant Cause = "constant"
	// CauseOverrun: bytes outside the target were written.
	CauseOverrun Cause = "overrun"
	// CauseRead: a kernel on the device read other bytes than the expected ones, which a copy
	// to the host shows to be there. Found is empty.
	CauseRead Cause = "read"
)

// A Difference describes how found bytes differ from expected ones.
type Difference struct {
	// FirstBadOffsetBytes is the offset of the first mismatched byte in the copy. For an
	// overrun it is negative before the target, and the size or more behind it.
	FirstBadOffsetBytes int `json:"first_bad_offset_bytes"`
	// LastBadOffsetBytes is the offset of the last mismatched byte.
	LastBadOffsetBytes int `json:"last_bad_offset_bytes"`
	// Expected has up to 16 expected bytes, from the first mismatched one on.
	Expected Hex `json:"expected_hex"`
	// Found has the bytes found there.
	Found Hex `json:"found_hex"`
	// BadBytes is the number of mismatched bytes.
	BadBytes int `json:"bad_bytes"`
	// BadBits is the number of mismatched bits.
	BadBits int `json:"bad_bits"`
	// Regions is the number of mismatched ranges; ranges less than 8 bytes apart are one.
	Regions int `json:"bad_regions"`
	// PageBytes is the page size at whose edges every region starts and ends
	// (4 KiB, 64 KiB or 2 MiB), 0 when there is none.
	PageBytes int `json:"page_bytes,omitempty"`
	// PageOf is the address that PageBytes counts from: PageOfSource,
	// PageOfDevice or PageOfReturn.
	PageOf string `json:"page_of,omitempty"`
	// StrideBytes is the distance between the starts of mismatched ranges, if all have the
	// same distance and length; else 0.
	StrideBytes int `json:"stride_bytes,omitempty"`
	// StrideRunBytes is the length of these ranges.
	StrideRunBytes int `json:"stride_run_bytes,omitempty"`
	// Cause classifies the mismatched bytes.
	Cause Cause `json:"cause,omitempty"`
	// At names the target that has stale bytes, was overrun or was read incorrectly: AtDevice
	// (the target of an upload), AtHop (of a copy on the device), AtPeer (of a copy to
	// another device) or AtReturn (of a download). Several are joined by commas.
	At string `json:"at,omitempty"`
	// ShiftBytes is the distance by which every mismatched byte is behind its place:
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
	if h == nil {
		return errors.New("verify: unmarshal into a nil Hex")
	}
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
	switch {
	case d.Cause == CauseStale:
		fmt.Fprintf(&b, "; stale: %s did not arrive", staleText(d.At))
	case d.Cause == CauseShifted:
		side, k := "later", d.ShiftBytes
		if k < 0 {
			side, k = "earlier", -k
		}
		fmt.Fprintf(&b, "; the right bytes, but %s %s than they belong", units.ExactBytes(k), side)
	case d.Cause == CauseConstant && len(d.Found) > 0:
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
