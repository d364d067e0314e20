package kernellog

import (
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/internal/linux"
)

// A Kind is what a message is about.
type Kind string

// The kinds.
const (
	KindXid         Kind = "xid"
	KindOffBus      Kind = "off_bus"      // the GPU has fallen off the bus
	KindInit        Kind = "init_failed"  // RmInitAdapter failed
	KindWindow      Kind = "no_window"    // a BAR of a GPU has no address
	KindMismatch    Kind = "api_mismatch" // library and kernel module have different versions
	KindUnsupported Kind = "unsupported"  // the kernel module does not support the GPU
	KindNeedsOpen   Kind = "needs_open"   // the GPU needs the open kernel module
	KindTaken       Kind = "taken"        // another driver has the GPU
	KindUnsigned    Kind = "unsigned"     // the kernel refused a module
	KindAER         Kind = "aer"          // an error of PCI Express
	KindOOM         Kind = "oom"          // the kernel killed a process for lack of memory
)

// Event is a message of the kernel's log, and others of the same kind, GPU and number.
type Event struct {
	Kind Kind `json:"kind"`
	Xid  int  `json:"xid,omitempty"`
	// Address is that of the device; empty if the message has none.
	Address string `json:"pci_address,omitempty"`
	// Severity is that of an error of PCI Express: Corrected, Uncorrected (Non-Fatal) or Uncorrected (Fatal).
	Severity string `json:"severity,omitempty"`
	PID      int    `json:"pid,omitempty"`
	Process  string `json:"process,omitempty"`
	Text     string `json:"text"` // the first message
	Count    int    `json:"count"`
	// When is the time of the last message as the log has it, and Seconds that since boot; nil if unknown.
	When    string   `json:"when,omitempty"`
	Seconds *float64 `json:"at_s,omitempty"`
	// Age is the time from the last message until the host was read; nil if unknown.
	Age *float64 `json:"age_s,omitempty"`
}

// maxEvents is more kinds of messages than hosts have.
const maxEvents = 200

var (
	// NVRM: Xid (PCI:0000:9b:00): 119, pid=1, name=x, …, and with an instance of MIG: (PCI:0000:9b:00 GPU-I:05)
	xidMessage = regexp.MustCompile(`Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?(?: [^)]{1,20})?\): (\d{1,5})\b`)
	address    = regexp.MustCompile(`\b([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)\b`)
	xidPID     = regexp.MustCompile(`\bpid='?(\d{1,10})`)
	xidName    = regexp.MustCompile(`\bname=([^,<]{1,64})`)
	killed     = regexp.MustCompile(`(?i)out of memory: killed? process (\d{1,10}) \(([^)]{1,64})\)`)
	severity   = regexp.MustCompile(`severity=(Corrected|Correctable|Uncorrected \((?:Non-)?Fatal\)|Uncorrectable \((?:Non-)?Fatal\))`)
)

// A message is a row of messages: the words by which it is known, and whether it is NVIDIA's module that writes it.
type message struct {
	kind  Kind
	words []string
	nvrm  bool
}

// fits reports whether a text has all words.
func (m message) fits(text string) bool {
	return !slices.ContainsFunc(m.words, func(w string) bool { return !strings.Contains(text, w) })
}

// messages are those other than Xids. The first row that fits counts.
var messages = []message{
	{KindOffBus, []string{"fallen off the bus"}, true},
	{KindInit, []string{"RmInitAdapter failed"}, true},
	{KindInit, []string{"rm_init_adapter", "failed"}, true},
	{KindInit, []string{"Cannot initialize GSP firmware"}, true},
	{KindInit, []string{"WPR2 already up"}, true},
	{KindWindow, []string{"PCI I/O region assigned to your NVIDIA device is invalid"}, true},
	{KindWindow, []string{"BAR", "is 0M @ 0x0"}, true},
	{KindMismatch, []string{"API mismatch"}, true},
	{KindNeedsOpen, []string{"requires use of the NVIDIA open kernel modules"}, true},
	{KindUnsupported, []string{"is not supported by"}, true},
	{KindUnsupported, []string{"Legacy drivers"}, true},
	{KindTaken, []string{"probe routine was not called for"}, true},
	{KindWindow, []string{"BAR ", "assign"}, false},
	{KindWindow, []string{"BAR ", "no space for"}, false},
	{KindUnsigned, []string{"Loading of unsigned module is rejected"}, false},
	{KindUnsigned, []string{"Loading of module with unavailable key is rejected"}, false},
	{KindUnsigned, []string{"unsigned module loading is restricted"}, false},
	{KindAER, []string{"PCIe Bus Error: severity="}, false},
	{KindOOM, []string{"ut of memory: Kill"}, false},
}

// failedWindow are the words of a BAR that got no address; others report success.
var failedWindow = []string{"no space for", "failed to assign", "can't assign"}

// A Parser collects events from the lines of a log. The zero value is ready.
type Parser struct {
	events []Event
	// about is the GPU of a message of several lines: "NVRM: The NVIDIA GPU 0000:01:00.0".
	about string
	// open is how many more lines the last event's message may have.
	open int
}

// interesting are words of lines that Parse makes something of, and dull those of lines of NVIDIA's module that have
// serial numbers, UUIDs and tables of calls.
var (
	interesting = []string{"NVRM", "Linux version ", "no space for", "failed to assign", "can't assign", "severity=",
		"unsigned module", "unavailable key", "ut of memory: Kill"}
	dull = []string{"NVRM: GPU at PCI:", "erial Number", "erial number", "NVRM:    "}
)

// Matters reports whether a line of a log is one that Parse makes something of.
func Matters(s string) bool {
	in := func(word string) bool { return strings.Contains(s, word) }
	return slices.ContainsFunc(interesting, in) && !slices.ContainsFunc(dull, in) || newBoot(s)
}

// Parse returns the events of a log since the last boot in it.
func Parse(text string) []Event {
	var p Parser
	for s := range strings.Lines(text) {
		p.Line(s)
	}
	return p.events
}

// Line takes the next line. It returns whether it is of a kernel's log.
func (p *Parser) Line(s string) bool {
	l, isLog := cut(s)
	if newBoot(s) || isLog && strings.HasPrefix(l.text, "Linux version ") { // what was before is of an earlier one
		*p = Parser{}
	}
	// Lines without a prefix continue a message in journalctl, and people paste them.
	if trimmed := strings.TrimLeft(l.text, " \t"); !isLog && !strings.HasPrefix(trimmed, "NVRM: ") {
		return false
	} else if !isLog {
		l.text = trimmed
	}
	if !Matters(l.text) {
		p.about, p.open = "", 0
		return true
	}
	for part := range strings.SplitSeq(l.text, `\x0a`) { // a line feed in /dev/kmsg
		l.text = part
		p.message(l)
	}
	return true
}

// message takes a line of a message.
func (p *Parser) message(l line) {
	e, ok := p.classify(l)
	if rest, isNVRM := strings.CutPrefix(l.text, "NVRM: "); !ok && isNVRM && p.open > 0 {
		p.open--
		last := &p.events[len(p.events)-1]
		last.Text += " " + strings.TrimSpace(rest)
		return
	}
	p.open = 0
	if !ok {
		return
	}
	if before := len(p.events); p.add(e, l) && len(p.events) > before && continued[e.Kind] {
		p.open = maxContinued
	}
}

// continued are the kinds whose messages have several lines, and maxContinued how many that are kept.
var continued = map[Kind]bool{KindMismatch: true, KindUnsupported: true, KindNeedsOpen: true, KindTaken: true}

const maxContinued = 2

// classify makes an event of a message.
func (p *Parser) classify(l line) (e Event, ok bool) {
	text := l.text
	nvrm := strings.HasPrefix(text, "NVRM")
	if !nvrm {
		p.about = ""
	} else if strings.Contains(text, "NVIDIA GPU ") {
		p.about = addressIn(text)
	}
	if m := xidMessage.FindStringSubmatch(text); nvrm && m != nil {
		e = Event{Kind: KindXid, Address: wholeAddress(m[1])}
		e.Xid, _ = strconv.Atoi(m[2])
		if pid := xidPID.FindStringSubmatch(text); pid != nil {
			e.PID, _ = strconv.Atoi(pid[1])
		}
		if name := xidName.FindStringSubmatch(text); name != nil {
			e.Process = strings.TrimSpace(name[1])
		}
		return e, true
	}
	i := slices.IndexFunc(messages, func(m message) bool { return m.nvrm == nvrm && m.fits(text) })
	if i < 0 {
		return Event{}, false
	}
	return p.complete(Event{Kind: messages[i].kind, Address: addressIn(text)}, text)
}

// complete adds what messages of a kind contain.
func (p *Parser) complete(e Event, text string) (Event, bool) {
	switch e.Kind {
	case KindWindow:
		failed := strings.HasPrefix(text, "NVRM") || slices.ContainsFunc(failedWindow, func(w string) bool { return strings.Contains(text, w) })
		return e, failed && (e.Address != "" || strings.HasPrefix(text, "NVRM"))
	case KindAER:
		m := severity.FindStringSubmatch(text)
		if m == nil {
			return e, false
		}
		e.Severity = strings.NewReplacer("Correctable", "Corrected", "Uncorrectable", "Uncorrected").Replace(m[1])
		return e, e.Address != ""
	case KindOOM:
		m := killed.FindStringSubmatch(text)
		if m == nil {
			return e, false
		}
		e.PID, _ = strconv.Atoi(m[1])
		e.Process, e.Address = m[2], ""
		return e, true
	case KindUnsigned:
		return e, true
	}
	if e.Address == "" {
		e.Address = p.about
	}
	return e, true
}

// addressIn returns the first PCI address of a message in the form of sysfs, or "".
func addressIn(text string) string {
	m := address.FindString(text)
	if m == "" {
		return ""
	}
	return wholeAddress(m)
}

func wholeAddress(text string) string {
	if !strings.Contains(text, ".") {
		text += ".0"
	}
	a, err := linux.ParsePCIAddress(text)
	if err != nil {
		return ""
	}
	return a.String()
}

// add adds an event, or counts it with those that are alike.
func (p *Parser) add(e Event, l line) bool {
	same := func(o Event) bool {
		return o.Kind == e.Kind && o.Xid == e.Xid && o.Address == e.Address && o.Severity == e.Severity && (e.Kind != KindOOM || o.PID == e.PID)
	}
	i := slices.IndexFunc(p.events, same)
	switch {
	case i < 0 && len(p.events) >= maxEvents:
		return false
	case i < 0:
		e.Text = strings.TrimSpace(l.text)
		p.events, i = append(p.events, e), len(p.events)
	}
	at := &p.events[i]
	at.Count++
	at.When = l.when
	if l.seconds >= 0 {
		at.Seconds = &l.seconds
	}
	return true
}
