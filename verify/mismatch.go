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

// A Mismatch is a case with bytes that differ from the expected ones, and how they differ.
type Mismatch struct {
	// Case is the round trip.
	Case
	// FirstBadOffsetBytes is the offset of the first mismatched byte in the copy. For an
	// overrun it is negative before the target, and the size or more behind it.
	FirstBadOffsetBytes int `json:"first_bad_offset_bytes"`
	// LastBadOffsetBytes is the offset of the last mismatched byte.
	LastBadOffsetBytes int `json:"last_bad_offset_bytes"`
	// ExpectedHex has up to 16 expected bytes, from the first mismatched one on, as hexadecimal digits.
	ExpectedHex string `json:"expected_hex"`
	// FoundHex has the bytes found there.
	FoundHex string `json:"found_hex"`
	// BadBytes is the number of mismatched bytes.
	BadBytes int `json:"bad_bytes"`
	// BadBits is the number of mismatched bits.
	BadBits int `json:"bad_bits"`
	// Regions is the number of mismatched ranges; ranges less than 8 bytes apart are one.
	Regions int `json:"bad_regions"`
	// PageBytes is the page size at whose edges every region starts and ends
	// (4 KiB, 64 KiB or 2 MiB), 0 when there is none.
	PageBytes int `json:"page_bytes,omitempty"`
	// PageOf is the address that PageBytes counts from: "source host address",
	// "device address" or "returning host address".
	PageOf string `json:"page_of,omitempty"`
	// StrideBytes is the distance between the starts of mismatched ranges, if all have the
	// same distance and length; else 0.
	StrideBytes int `json:"stride_bytes,omitempty"`
	// StrideRunBytes is the length of these ranges.
	StrideRunBytes int `json:"stride_run_bytes,omitempty"`
	// Cause classifies the mismatched bytes.
	Cause Cause `json:"cause,omitempty"`
	// At names the target that has stale bytes, was overrun or was read incorrectly: "device"
	// (the target of an upload), "second device buffer" (of a copy on the device), "other device" (of a copy to
	// another device), "source host buffer" or "returning host buffer" (of a download). Several are joined by commas.
	At string `json:"at,omitempty"`
	// ShiftBytes is the distance by which every mismatched byte is behind its place:
	// found[i] = expected[i-ShiftBytes].
	ShiftBytes int `json:"shift_bytes,omitempty"`
}

// String returns the mismatch in one line.
func (m Mismatch) String() string {
	s := m.Case.String() + ": " + m.describe()
	if m.Path == pathPeer && m.Cause != causeOverrun {
		s += "; if other paths are right, the path between the GPUs loses them: an IOMMU that translates (iommu=pt ends that) or access control (ACS) of a PCI Express bridge"
	}
	return s
}

// A Cause classifies a mismatch by its bytes. Empty stands for an unknown one.
//
//	stale     the bytes are the poison written before the copy. The copy did not arrive
//	shifted   the bytes are the expected ones of another offset
//	constant  all mismatched bytes have one value
//	overrun   bytes outside the target were written
//	read      a kernel on the device read other bytes than the expected ones, which a copy to the host shows to be
//	          there. Found is empty
type Cause string

const (
	causeStale    Cause = "stale"
	causeShifted  Cause = "shifted"
	causeConstant Cause = "constant"
	causeOverrun  Cause = "overrun"
	causeRead     Cause = "read"
)

const (
	// atDevice is the memory on the device that an upload writes.
	atDevice = "device"
	// atHop is the memory on the device that a copy on the device writes.
	atHop = "second device buffer"
	// atPeer is the memory on another device.
	atPeer = "other device"
	// atSource is the host memory that is sent.
	atSource = "source host buffer"
	// atReturn is the host memory that a download writes.
	atReturn = "returning host buffer"
)

const (
	// pageOfSource is the address of the host memory that is sent.
	pageOfSource = "source host address"
	// pageOfDevice is the address of the memory on the device.
	pageOfDevice = "device address"
	// pageOfReturn is the address of the host memory that receives.
	pageOfReturn = "returning host address"
)

// spaced separates the bytes of hexadecimal digits.
func spaced(digits string) string {
	b, _ := hex.DecodeString(digits) // what does not decode is not shown
	return fmt.Sprintf("% x", b)
}

func (m Mismatch) describe() string {
	var b strings.Builder
	if m.Cause == causeOverrun {
		fmt.Fprintf(&b, "%d bytes outside the %s's target written, from offset %d", m.BadBytes, m.At, m.FirstBadOffsetBytes)
	} else {
		fmt.Fprintf(&b, "%d of %d bytes wrong, the first at offset %d", m.BadBytes, m.SizeBytes, m.FirstBadOffsetBytes)
	}
	if m.Cause == causeRead {
		fmt.Fprintf(&b, ", as a kernel reads the %s: expected %v; copied to the host they are right", m.At, spaced(m.ExpectedHex))
		return b.String()
	}
	fmt.Fprintf(&b, ": expected %v, found %v", spaced(m.ExpectedHex), spaced(m.FoundHex))
	switch {
	case m.BadBits == 1:
		b.WriteString("; a single bit")
	case m.Regions > 1:
		fmt.Fprintf(&b, "; %d stretches", m.Regions)
	}
	if m.StrideBytes > 0 {
		fmt.Fprintf(&b, "; %s every %s", units.ExactBytes(m.StrideRunBytes), units.ExactBytes(m.StrideBytes))
	}
	if m.PageBytes > 0 {
		fmt.Fprintf(&b, "; follows %s pages of the %s", units.ExactBytes(m.PageBytes), m.PageOf)
	}
	switch {
	case m.Cause == causeStale:
		fmt.Fprintf(&b, "; stale: %s did not arrive", staleText(m.At))
	case m.Cause == causeShifted:
		side, k := "later", m.ShiftBytes
		if k < 0 {
			side, k = "earlier", -k
		}
		fmt.Fprintf(&b, "; the right bytes, but %s %s than they belong", units.ExactBytes(k), side)
	case m.Cause == causeConstant && m.FoundHex != "":
		fmt.Fprintf(&b, "; every wrong byte is 0x%s", m.FoundHex[:2])
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
