package main

import (
	"fmt"
	"regexp"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// manual returns the manual page in the macros of man(7). Its text is that of the commands' help.
func manual(root *cobra.Command) string {
	var p page
	fmt.Fprintf(&p, ".TH PINCHECK 1 %q %q Pinned\n", buildDate(), "pincheck "+tool().Version) // a date is not escaped
	p.macro("SH", "NAME")
	p.line("pincheck - " + strings.ToLower(root.Short[:1]) + root.Short[1:])
	p.macro("SH", "SYNOPSIS")
	p.macro("B", "pincheck")
	p.line("[options]")
	p.macro("br")
	p.macro("B", "pincheck")
	p.line("command [options] [arguments]")
	p.macro("SH", "DESCRIPTION")
	p.help(root.Long)
	p.example(root)
	p.macro("SH", "COMMANDS")
	p.commands(root)
	p.macro("SH", "OPTIONS")
	p.line("Of pincheck without a command. Other commands have those of these that their help lists.")
	p.flags(flagList(root, func(*pflag.Flag) bool { return true }))
	p.macro("SH", "EXIT STATUS")
	p.help(exitStatus)
	p.macro("SH", "ENVIRONMENT")
	p.item("PINNED_CUDART", "libcudart or libcuda to load, unless --library is given")
	p.item("CUDA_VISIBLE_DEVICES", "GPUs that CUDA shows to the process")
	p.macro("SH", "SEE ALSO")
	p.macro("BR", "nvidia-smi", "(1)")
	return p.String()
}

// commands writes the sections of the commands below cmd.
func (p *page) commands(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		if !c.IsAvailableCommand() {
			continue
		}
		p.macro("SS", strings.TrimSuffix(c.UseLine(), " [flags]"))
		p.help(c.Long)
		p.example(c)
		p.flags(flagList(c, func(f *pflag.Flag) bool { return !isShared(f) }))
		p.commands(c)
	}
}

// example writes the examples of a command as they are.
func (p *page) example(c *cobra.Command) {
	if c.Example == "" {
		return
	}
	p.macro("PP")
	p.macro("EX")
	for line := range strings.Lines(strings.TrimLeft(c.Example, "\n")) {
		p.WriteString(roff(strings.TrimRight(line, "\n")) + "\n")
	}
	p.macro("EE")
}

// buildDate returns the day of the commit that was built, or "" if the build did not record it.
func buildDate() string {
	info, _ := debug.ReadBuildInfo()
	if info == nil {
		return ""
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.time" {
			return s.Value[:min(len(s.Value), len("2006-01-02"))]
		}
	}
	return ""
}

// A page is text in the macros of man(7).
type page struct{ strings.Builder }

func (p *page) macro(name string, arguments ...string) {
	p.WriteString("." + name)
	for _, a := range arguments {
		fmt.Fprintf(p, ` "%s"`, strings.ReplaceAll(roff(a), `"`, `\(dq`))
	}
	p.WriteByte('\n')
}

// maxLine is the length in bytes of lines that mandoc's lint does not complain about.
const maxLine = 80

// line writes words, over as many lines as they need.
func (p *page) line(text string) {
	length := 0
	for word := range strings.FieldsSeq(roff(text)) {
		switch {
		case length == 0:
		case length+1+len(word) > maxLine:
			p.WriteByte('\n')
			length = 0
		default:
			p.WriteByte(' ')
			length++
		}
		if length == 0 && word[0] == '.' {
			word = `\&` + word
		}
		p.WriteString(word)
		length += len(word)
	}
	p.WriteByte('\n')
}

// item writes a term and what it means.
func (p *page) item(term, text string) {
	p.macro("TP")
	p.macro("B", term)
	p.line(text)
}

// coded is a line of a list in a help text, such as one of exitStatus.
var coded = regexp.MustCompile(`^  (\S+)  +(.*)$`)

// help writes the text of a command.
func (p *page) help(text string) {
	text = strings.TrimRight(text, "\n")
	begin, list := false, false // the next line begins a paragraph; the last one was of a list
	for line := range strings.SplitSeq(text, "\n") {
		m := coded.FindStringSubmatch(line)
		switch {
		case line == "":
		case m != nil:
			p.item(m[1], m[2])
		case begin || list:
			p.macro("PP")
			fallthrough
		default:
			p.line(line)
		}
		begin, list = line == "", m != nil
	}
}

// flagLine is the first line of a flag in a help text: its names, and what it does.
var flagLine = regexp.MustCompile(`^ +(-.*?) {3,}(.*)$`)

// flags writes the flags of a help text.
func (p *page) flags(text string) {
	for line := range strings.Lines(text) {
		m := flagLine.FindStringSubmatch(strings.TrimRight(line, "\n"))
		switch {
		case m == nil: // the text of the flag above goes on
			p.line(line)
		case !strings.HasSuffix(m[1], "--help"):
			p.item(m[1], m[2])
		}
	}
}

var roffEscapes = strings.NewReplacer(`\`, `\e`, "`", `\(ga`, "-", `\-`, "'", `\(aq`, "^", `\(ha`, "~", `\(ti`)

// roff escapes what is special to roff, and writes what is not ASCII by its number.
func roff(text string) string {
	var b strings.Builder
	for _, r := range roffEscapes.Replace(text) {
		if r < 0x80 {
			b.WriteRune(r)
		} else {
			fmt.Fprintf(&b, `\[u%04X]`, r)
		}
	}
	return b.String()
}
