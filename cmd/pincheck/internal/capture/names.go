package capture

import (
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing/fstest"
)

// Names are words of a host that name it or its users, which [Archive.WithoutNames] takes
// out wherever they occur.
type Names struct {
	Hosts []string // gpu-17.example.com
	Users []string
}

// WithoutNames returns the archive without what names the host, its users and its hardware:
// the names, home directories, IP and MAC addresses, and UUIDs of GPUs. Each is replaced by
// another one of its kind, equal ones by equal ones, so that the checks see the same.
func (a *Archive) WithoutNames(names Names) *Archive {
	s := &scrubber{given: map[string]string{}}
	for _, name := range names.Hosts {
		short, _, _ := strings.Cut(name, ".")
		s.addName(name, "host")
		s.addName(short, "host")
	}
	for _, name := range names.Users {
		s.addName(name, "user")
	}
	// Longer ones first: the short name of a host is part of its long one.
	slices.SortStableFunc(s.names, func(x, y string) int { return len(y) - len(x) })

	return a.with(s.scrub, func(text string) string { return text })
}

// with returns the archive with its texts, and the names of files, changed; mounts with another change.
func (a *Archive) with(change, mounts func(string) string) *Archive {
	out := &Archive{Host: make(fstest.MapFS, len(a.Host))}
	if len(a.Facts) > 0 {
		out.Facts = changeJSON(a.Facts, change) // first: it has the UUIDs in full
	}
	for _, name := range slices.Sorted(maps.Keys(a.Host)) {
		file := *a.Host[name]
		if file.Mode&fs.ModeDevice == 0 {
			text := string(file.Data)
			if path.Base(name) == "mountinfo" {
				text = mounts(text)
			}
			file.Data = []byte(change(text))
		}
		out.Host[change(name)] = &file
	}
	for _, entry := range a.Environ {
		out.Environ = append(out.Environ, change(entry))
	}
	return out
}

// A scrubber replaces what names somebody or something. Given are the replacements so far.
type scrubber struct {
	given map[string]string
	count [kinds]int
	names []string
}

// The kinds of replacements. Addresses are of the ranges that are for documents.
const (
	kindHost = iota
	kindUser
	kindUUID
	kindIPv4
	kindIPv6
	kindMAC
	kinds
)

// common are names that name nobody, and that stand in files, and in their paths, for something else.
var common = []string{"root", "user", "users", "host", "localhost", "nvidia", "ubuntu", "linux", "docker", "memory", "cgroup", "system", "default", "admin", "home",
	"vm", "gpu", "node", "server", "proc", "sys", "dev", "etc", "lib", "kernel", "module", "driver", "drivers", "device", "devices", "bus", "pci", "class", "fs", "mm", "cuda"}

func (s *scrubber) addName(name, kind string) {
	if len(name) < 2 || slices.Contains(common, strings.ToLower(name)) || s.given[name] != "" {
		return
	}
	k := kindHost
	if kind == "user" {
		k = kindUser
	}
	s.count[k]++
	s.given[name] = fmt.Sprintf("%s-%d", kind, s.count[k])
	s.names = append(s.names, name)
}

var (
	homePattern = regexp.MustCompile(`(/(?:home|Users|scratch/users)/)([^/\s:",]+)`)
	// Servers of mounted file systems: nas.example.com:/export, //nas/share.
	serverPattern = regexp.MustCompile(`(?m)((?:^|\s|@)(?://)?)([A-Za-z0-9][A-Za-z0-9._-]*)(://|:/|/)`)
	urlPattern    = regexp.MustCompile(`(://(?:[^\s/"'@]*@)?)([A-Za-z0-9][A-Za-z0-9.-]*)`)
	uuidPattern   = regexp.MustCompile(`\b(GPU|MIG)-([0-9a-f]{4,8})((?:-[0-9a-f]{4}){3}-[0-9a-f]{12})?\b`)
	ipv4Pattern   = regexp.MustCompile(`\d{1,3}(?:\.\d{1,3}){3}`)
	ipv6Pattern   = regexp.MustCompile(`(?i)[0-9a-f]{1,4}:[0-9a-f:]*:[0-9a-f]{1,4}`)
	macPattern    = regexp.MustCompile(`(?i)\b[0-9a-f]{2}(?::[0-9a-f]{2}){5}(?::[0-9a-f]{2}){0,2}\b`)
)

func (s *scrubber) scrub(text string) string {
	text = homePattern.ReplaceAllStringFunc(text, func(path string) string {
		m := homePattern.FindStringSubmatch(path)
		if slices.Contains(common, m[2]) {
			return path
		}
		s.addName(m[2], "user")
		if s.given[m[2]] == "" {
			return m[1] + "user"
		}
		return m[1] + s.given[m[2]]
	})
	for _, name := range s.names {
		text = replaceWord(text, name, s.given[name])
	}
	text = serverPattern.ReplaceAllStringFunc(text, func(server string) string {
		m := serverPattern.FindStringSubmatch(server)
		if m[3] == "://" || strings.HasSuffix(m[1], "//") != (m[3] == "/") {
			return server
		}
		return m[1] + s.host(m[2]) + m[3]
	})
	text = urlPattern.ReplaceAllStringFunc(text, func(url string) string {
		m := urlPattern.FindStringSubmatch(url)
		return m[1] + s.host(m[2])
	})
	text = uuidPattern.ReplaceAllStringFunc(text, s.uuid)
	text = macPattern.ReplaceAllStringFunc(text, func(mac string) string {
		return s.replace(mac, kindMAC, func(n int) string { return fmt.Sprintf("00:00:5e:00:53:%02x", n%256) })
	})
	text = s.addresses(text, ipv6Pattern, kindIPv6, func(n int) string { return fmt.Sprintf("2001:db8::%x", n) })
	return s.addresses(text, ipv4Pattern, kindIPv4, func(n int) string { return fmt.Sprintf("192.0.%d.%d", 2+n/256%2, n%256) })
}

// host replaces the name of a server. Addresses are replaced as such.
func (s *scrubber) host(name string) string {
	if _, err := netip.ParseAddr(name); err == nil || slices.Contains(common, name) || hostGiven.MatchString(name) {
		return name
	}
	return s.replace(name, kindHost, func(n int) string { return fmt.Sprintf("host-%d", n) })
}

var hostGiven = regexp.MustCompile(`^host-\d+$`)

func (s *scrubber) replace(old string, kind int, with func(n int) string) string {
	if s.given[old] == "" {
		s.count[kind]++
		s.given[old] = with(s.count[kind])
	}
	return s.given[old]
}

// uuid replaces a UUID, or the beginning of one, as CUDA_VISIBLE_DEVICES may have it.
func (s *scrubber) uuid(uuid string) string {
	m := uuidPattern.FindStringSubmatch(uuid)
	first := s.replace(m[1]+"-"+m[2], kindUUID, func(n int) string { return fmt.Sprintf("%s-%0*x", m[1], len(m[2]), n) })
	if m[3] == "" {
		return first
	}
	return first + "-0000-0000-0000-000000000000"
}

// addresses replaces what parses as an address, is none of the machine itself, and stands
// alone: 5.15.153.1-microsoft is a version.
func (s *scrubber) addresses(text string, pattern *regexp.Regexp, kind int, with func(n int) string) string {
	var b strings.Builder
	end := 0
	for _, at := range pattern.FindAllStringIndex(text, -1) {
		word := text[at[0]:at[1]]
		address, err := netip.ParseAddr(word)
		if err != nil || address.IsLoopback() || address.IsUnspecified() || inWord(text, at[0]-1) || inWord(text, at[1]) {
			continue
		}
		b.WriteString(text[end:at[0]] + s.replace(word, kind, with))
		end = at[1]
	}
	b.WriteString(text[end:])
	return b.String()
}

// inWord reports whether the byte at i continues a word. A dot at the end of a sentence
// does not.
func inWord(text string, i int) bool {
	if i < 0 || i >= len(text) {
		return false
	}
	if c := text[i]; c == '.' {
		return i+1 < len(text) && isWord(text[i+1])
	} else {
		return isWord(c) || c == '-'
	}
}

func isWord(c byte) bool {
	return c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

// replaceWord replaces a name where it stands alone.
func replaceWord(text, name, with string) string {
	var b strings.Builder
	for rest := text; ; {
		i := strings.Index(rest, name)
		if i < 0 {
			b.WriteString(rest)
			return b.String()
		}
		end := i + len(name)
		b.WriteString(rest[:i])
		if i > 0 && isWord(rest[i-1]) || end < len(rest) && isWord(rest[end]) {
			b.WriteString(name)
		} else {
			b.WriteString(with)
		}
		rest = rest[end:]
	}
}
