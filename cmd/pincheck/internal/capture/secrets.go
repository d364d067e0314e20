package capture

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// WithoutSecrets returns the archive without passwords, tokens and keys, and without the names with
// which they are used: in URLs and sources of mounts, in options of mounts, in command lines and
// variables, and by the forms that tokens of widely used services have. Equal ones are replaced by
// equal ones.
func (a *Archive) WithoutSecrets() *Archive {
	s := &secrets{given: map[string]string{}}
	return a.with(s.replace, s.mounts)
}

// A secrets replaces secrets. Given are the replacements so far.
type secrets struct {
	given map[string]string
}

func (s *secrets) name(secret string) string {
	if secret == "" || secretName.MatchString(secret) {
		return secret
	}
	if s.given[secret] == "" {
		s.given[secret] = fmt.Sprintf("secret-%d", len(s.given)+1)
	}
	return s.given[secret]
}

var (
	secretName = regexp.MustCompile(`^secret-\d+$`)
	// https://user:password@host, also with a password in which the reserved characters are not
	// escaped: up to the last @ of the word.
	urlUser = regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.-]*://)([^\s"'<>|]*)@`)
	// https://host/path?X-Amz-Signature=…
	urlQuery = regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.-]*://[^\s"'<>|?#]*[?#])([^\s"'<>|]+)`)
	// user@host:path and user:password@host:path
	remoteUser = regexp.MustCompile(`([^\s/"'<>|=,()@]+)@(\[?[A-Za-z0-9][A-Za-z0-9_.:-]*\]?:)`)
	// --password=…, "token: …", AWS_SECRET_ACCESS_KEY=…, password,…: what is behind such a word
	secretField = regexp.MustCompile(`(?i)((?:^|[^A-Za-z])[A-Za-z0-9_.-]*(?:password|passwd|passphrase|secret|token|credentials?|api[_-]?key|access[_-]?key(?:[_-]?id)?|private[_-]?key|account[_-]?key|signature|authorization)[A-Za-z0-9_]{0,8}["']?\s*[=:]\s*|(?:^|[^A-Za-z])-{0,2}(?:[A-Za-z0-9]+[_.-])*(?:pass|password2|pwd|pw|auth|cred|creds|key|sig|sas|pat|username|user|login|domain|upn)["']?=)("[^"]*"|'[^']*'|[^\s,;&"']+)`)
	// --token …
	secretFlag = regexp.MustCompile(`(?i)((?:^|[\s=/,:;"'])--?(?:[A-Za-z0-9]+[_-])*(?:password|passwd|passphrase|pass|secret|token|credentials?|key)\s+)("[^"]*"|'[^']*'|[^\s,;&"'-][^\s,;&"']*)`)
	bearer     = regexp.MustCompile(`(?i)(\b(?:bearer|basic)\s+)([A-Za-z0-9._~+/=-]{6,})`)
	// Tokens of Hugging Face, GitHub, GitLab, OpenAI and the like, NVIDIA, Slack, AWS, Google, and JWT.
	token = regexp.MustCompile(`\b(?:hf_|gh[a-z]_|github_pat_|glpat-|sk-|nvapi-|xox[a-z]-|AKIA|ASIA|AIza|ya29\.|eyJ[A-Za-z0-9_-]+\.)[A-Za-z0-9_.-]{10,}`)
	// Units of systemd are no users: user@1000.service:
	unit = regexp.MustCompile(`\.(?:service|scope|slice|socket|mount|swap|target):?$`)
)

// replace replaces the secrets in a text.
func (s *secrets) replace(text string) string {
	second := func(pattern *regexp.Regexp) {
		text = pattern.ReplaceAllStringFunc(text, func(found string) string {
			m := pattern.FindStringSubmatch(found)
			secret := strings.Trim(m[2], `"'`)
			return m[1] + strings.Replace(m[2], secret, s.name(secret), 1)
		})
	}
	text = urlUser.ReplaceAllStringFunc(text, func(found string) string {
		m := urlUser.FindStringSubmatch(found)
		return m[1] + s.name(m[2]) + "@"
	})
	second(urlQuery)
	text = remoteUser.ReplaceAllStringFunc(text, func(found string) string {
		m := remoteUser.FindStringSubmatch(found)
		if unit.MatchString(m[2]) || slices.Contains(common, m[1]) {
			return found
		}
		return s.name(m[1]) + "@" + m[2]
	})
	second(bearer) // before its field: "Authorization: Bearer …"
	second(secretField)
	second(secretFlag)
	return token.ReplaceAllStringFunc(text, s.name)
}

// safeOptions are the options of mounts that say how a file system works. Values of all others are
// replaced: which of them are secrets only their file system knows.
var safeOptions = []string{"rw", "ro", "mode", "size", "nr_inodes", "huge", "inode64", "data", "errors", "vers", "minorversion", "rsize", "wsize",
	"bsize", "namlen", "acregmin", "acregmax", "acdirmin", "acdirmax", "proto", "port", "mountport", "mountvers", "mountproto", "nconnect",
	"max_connect", "timeo", "retrans", "sec", "clientaddr", "addr", "mountaddr", "local_lock", "lookupcache", "cache", "caching", "trans", "msize",
	"uid", "gid", "forceuid", "forcegid", "file_mode", "dir_mode", "user_id", "group_id", "max_read", "blksize", "logbufs", "logbsize", "sunit",
	"swidth", "stripe", "commit", "barrier", "compress", "space_cache", "subvolid", "subvol", "lowerdir", "upperdir", "workdir", "index",
	"xino", "redirect_dir", "metacopy", "xattr", "acl", "fsc", "echo_interval", "actimeo", "readahead", "rasize", "snapshot", "seclabel"}

// mounts replaces what is no part of a mount's path in a line of mountinfo: all of the source up to
// its last @, whatever it is, and values of options.
func (s *secrets) mounts(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		before, after, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
		fields := strings.Split(after, " ")
		if !ok || len(fields) < 3 {
			b.WriteString(line)
			continue
		}
		last := len(fields) - 1
		source := strings.Join(fields[1:last], " ") // it may be empty, or have spaces
		if at := strings.LastIndexByte(source, '@'); at >= 0 && !strings.HasPrefix(source, "/dev/") {
			scheme := ""
			if i := strings.Index(source, "://"); i >= 0 && i < at {
				scheme = source[:i+3]
			}
			source = scheme + s.name(source[len(scheme):at]) + source[at:]
		}
		options := strings.Split(fields[last], ",")
		for i, option := range options {
			if name, value, ok := strings.Cut(option, "="); ok && !slices.Contains(safeOptions, name) {
				options[i] = name + "=" + s.name(value)
			}
		}
		fmt.Fprintf(&b, "%s - %s %s %s", before, fields[0], source, strings.Join(options, ","))
		if strings.HasSuffix(line, "\n") {
			b.WriteByte('\n')
		}
	}
	return b.String()
}

// changeJSON changes the strings of a JSON text, and the names of its fields.
func changeJSON(text []byte, change func(string) string) []byte {
	var all any
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if d.Decode(&all) != nil {
		return []byte(change(string(text)))
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if e.Encode(changed(all, change)) != nil {
		return nil // what was decoded can be encoded
	}
	return b.Bytes()
}

func changed(value any, change func(string) string) any {
	switch v := value.(type) {
	case string:
		return change(v)
	case []any:
		for i := range v {
			v[i] = changed(v[i], change)
		}
	case map[string]any:
		out := make(map[string]any, len(v))
		for _, name := range slices.Sorted(maps.Keys(v)) { // the same names for the same facts
			field := changed(v[name], change)
			if text, ok := field.(string); ok && field == v[name] && secretField.MatchString(name+"=.") { // {"HF_TOKEN": "…"}
				_, hidden, _ := strings.Cut(change(name+"="+text), "=")
				field = hidden
			}
			out[change(name)] = field
		}
		return out
	}
	return value
}
