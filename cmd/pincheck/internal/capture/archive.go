// Package capture stores what pincheck's doctor reads of a host in a small archive, so that
// it can be diagnosed elsewhere: docs/capture.md describes it.
//
// An archive is a tar file, compressed by gzip, with three texts: README.txt, host.txt with
// the files that were read, in the form of package hosttest, and facts.json with what CUDA
// and NVML returned and what was measured. Reading one creates no file: paths and links in
// host.txt are names in a file system that exists in memory alone, and lead nowhere else.
package capture

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"testing/fstest"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/jsonlimit"
	"github.com/gopinned/pinned/cmd/pincheck/internal/printable"
	"github.com/gopinned/pinned/internal/hosttext"
	"github.com/gopinned/pinned/internal/units"
)

// An Archive has the files that were read of a host.
type Archive struct {
	// Host are the files that were read, and Environ the variables that matter, as in
	// os.Environ.
	Host    fstest.MapFS
	Environ []string
	// Facts is the JSON of doctor.Facts without the host: what CUDA and NVML returned,
	// and what was measured. Empty for none.
	Facts json.RawMessage
}

// The names in an archive. environFile is in host.txt.
const (
	readmeFile  = "README.txt"
	hostFile    = "host.txt"
	factsFile   = "facts.json"
	environFile = "environ"
)

// The limits of an archive, which [Write] keeps and [Read] demands before it does the work. Real
// archives have some 100 KB and 1,000 files. Those of host.txt are in package hosttext.
const (
	maxPacked = 4 << 20   // bytes of the file
	maxHost   = 2 << 20   // of host.txt
	maxFile   = 512 << 10 // of one file in it: Write keeps the whole lines up to there
	maxFacts  = 2 << 20   // of facts.json
	maxReadme = 64 << 10
	// maxUnpacked is those with the headers of the tar file.
	maxUnpacked = maxHost + maxFacts + maxReadme + 64<<10
	maxFollowed = 20_000 // links of host.txt, of all paths that begin with one
	maxLinks    = 40     // one after the other
)

// factsLimits are those of facts.json. Real ones are nested 9 deep. What objects and lists take is far more
// than their text.
var factsLimits = jsonlimit.Limits{Depth: 32, Nested: 4_000, Values: 20_000}

const readme = `What pincheck read on a host (pincheck capture). Diagnose it anywhere:

    pincheck --from FILE

host.txt has the files of /proc, /sys, /dev and /etc that were read, as far as they
matter, and facts.json what CUDA and NVML returned and what was measured. Both are text:
look at them before you pass them on.
`

// Write writes the archive, unless Read would refuse it. Its texts show what commands a terminal as
// package printable does: they are made to be looked at.
func Write(w io.Writer, a *Archive) error {
	host := make(fstest.MapFS, len(a.Host)+1)
	for name, file := range a.Host {
		if len(file.Data) > maxFile {
			cut := *file
			cut.Data = cut.Data[:bytes.LastIndexByte(cut.Data[:maxFile], '\n')+1]
			file = &cut
		}
		host[name] = file
	}
	host[environFile] = &fstest.MapFile{Mode: 0o444, Data: []byte(strings.Join(a.Environ, "\n") + "\n")}
	compressed := gzip.NewWriter(w)
	archive := tar.NewWriter(compressed)
	for _, member := range []struct {
		name string
		data []byte
	}{
		{readmeFile, []byte(readme)},
		{hostFile, []byte(shown(hosttext.Format("", host)))},
		{factsFile, printable.JSON(a.Facts)},
	} {
		if len(member.data) == 0 {
			continue
		}
		if err := checkMember(member.name, member.data); err != nil {
			return fmt.Errorf("capture: write: %w", err)
		}
		header := &tar.Header{Typeflag: tar.TypeReg, Name: member.name, Mode: 0o644, Size: int64(len(member.data)), ModTime: time.Unix(0, 0)}
		if err := archive.WriteHeader(header); err != nil {
			return fmt.Errorf("capture: write: %w", err)
		}
		if _, err := archive.Write(member.data); err != nil {
			return fmt.Errorf("capture: write: %w", err)
		}
	}
	if err := archive.Close(); err != nil {
		return fmt.Errorf("capture: write: %w", err)
	}
	if err := compressed.Close(); err != nil {
		return fmt.Errorf("capture: write: %w", err)
	}
	return nil
}

// shown is printable.Text, but for the byte of which the configuration of a device that is off the bus
// consists.
func shown(text string) string {
	parts := strings.Split(text, "\xff")
	for i := range parts {
		parts[i] = printable.Text(parts[i])
	}
	return strings.Join(parts, "\xff")
}

// Read reads an archive, which may be hostile: what is not of the form that Write writes,
// and what is larger than any host, is an error. Texts are as they are: who shows them renders them.
func Read(r io.Reader) (*Archive, error) {
	members, err := readMembers(r)
	if err != nil {
		return nil, fmt.Errorf("capture: read: %w", err)
	}
	text, ok := members[hostFile]
	if !ok {
		return nil, fmt.Errorf("capture: read: there is no %s: not an archive of pincheck capture", hostFile)
	}
	a := &Archive{Facts: members[factsFile]}
	if a.Host, err = ParseHost(string(text)); err != nil {
		return nil, fmt.Errorf("capture: read: %s: %w", hostFile, err)
	}
	a.Environ = a.takeEnviron()
	return a, nil
}

// checkMember checks the content of a member, which is no larger than its limit.
func checkMember(name string, content []byte) error {
	if limit := memberLimits[name]; len(content) > limit {
		return tooLarge(name, limit)
	}
	if name != factsFile || len(content) == 0 {
		return nil
	}
	if err := factsLimits.Check(content); err != nil {
		return fmt.Errorf("%s %w", name, err)
	}
	return nil
}

// memberLimits are the members that an archive may have, and how large they may be.
var memberLimits = map[string]int{readmeFile: maxReadme, hostFile: maxHost, factsFile: maxFacts}

func tooLarge(name string, limit int) error {
	return fmt.Errorf("%s: more than %s", name, units.ExactBytes(limit))
}

// ParseHost parses host.txt.
func ParseHost(text string) (fstest.MapFS, error) {
	host, err := hosttext.Parse(text)
	if err != nil {
		return nil, err
	}
	followed := 0
	for name, file := range host {
		if len(file.Data) > maxFile {
			return nil, fmt.Errorf("%.100q: more than %s", name, units.ExactBytes(maxFile))
		}
		if file.Mode&fs.ModeSymlink == 0 {
			continue
		}
		n, ends := ends(host, name)
		if !ends {
			return nil, fmt.Errorf("%.100q: links in a circle", name)
		}
		if followed += n; followed > maxFollowed {
			return nil, fmt.Errorf("more than %d links to links", maxFollowed)
		}
	}
	return host, nil
}

// ends reports whether a link leads somewhere after at most maxLinks of them, as in the
// kernel, and how many they were.
func ends(host fstest.MapFS, name string) (links int, ok bool) {
	for n := range maxLinks {
		next, _ := follow(host, name)
		if next == "" {
			return n, true
		}
		name = next
	}
	return maxLinks, false
}

// takeEnviron takes the variables out of the files.
func (a *Archive) takeEnviron() []string {
	file := a.Host[environFile]
	delete(a.Host, environFile)
	if file == nil {
		return nil
	}
	return slices.DeleteFunc(strings.Split(string(file.Data), "\n"), func(s string) bool { return !strings.Contains(s, "=") })
}

// readMembers reads all of a file, to its checksum. Sizes are looked at before what they announce
// is read.
func readMembers(r io.Reader) (map[string][]byte, error) {
	packed := &io.LimitedReader{R: r, N: maxPacked + 1}
	buffered := bufio.NewReader(packed)
	unpacked, err := gzip.NewReader(buffered)
	if err != nil {
		return nil, fmt.Errorf("not an archive of pincheck capture: %w", err)
	}
	unpacked.Multistream(false)
	limited := &io.LimitedReader{R: unpacked, N: maxUnpacked + 1}
	// Where a limit ended the reading, that is the error.
	failed := func(err error) error {
		switch {
		case packed.N <= 0:
			return fmt.Errorf("more than %s", units.ExactBytes(maxPacked))
		case limited.N <= 0:
			return fmt.Errorf("more than %s, decompressed", units.ExactBytes(maxUnpacked))
		}
		return err
	}
	archive := tar.NewReader(limited)
	members := map[string][]byte{}
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, failed(fmt.Errorf("not a tar file: %w", err))
		}
		limit, known := memberLimits[header.Name]
		switch {
		case header.Typeflag != tar.TypeReg:
			return nil, fmt.Errorf("%.100q is no file: archives have neither links nor directories", header.Name)
		case !known:
			return nil, fmt.Errorf("%.100q is in no archive of pincheck", header.Name)
		case members[header.Name] != nil:
			return nil, fmt.Errorf("%s comes twice", header.Name)
		case header.Size > int64(limit):
			return nil, tooLarge(header.Name, limit)
		}
		content := make([]byte, header.Size)
		if _, err := io.ReadFull(archive, content); err != nil {
			return nil, failed(fmt.Errorf("%s: %w", header.Name, err))
		}
		if err := checkMember(header.Name, content); err != nil {
			return nil, err
		}
		members[header.Name] = content
	}
	// The checksum is behind the end of the tar file, and behind the checksum is nothing.
	if _, err := io.Copy(io.Discard, limited); err != nil || limited.N <= 0 {
		return nil, failed(fmt.Errorf("damaged: %w", err))
	}
	if _, err := buffered.ReadByte(); !errors.Is(err, io.EOF) {
		return nil, failed(errors.New("there is more behind its end"))
	}
	return members, nil
}

// Environ returns the variables with which a host reads the same again.
func Environ(host *hostinfo.Host) []string {
	var environ []string
	for name, value := range host.Env {
		environ = append(environ, name+"="+value)
	}
	for _, evidence := range host.Virt.Evidence {
		if !strings.HasPrefix(evidence, "/") { // a variable that is not reported, with or without its value
			name, value, _ := strings.Cut(evidence, "=")
			environ = append(environ, name+"="+value)
		}
	}
	slices.Sort(environ)
	return environ
}
