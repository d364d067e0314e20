package main

import (
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

// The flags that commands share, by what a command does. A command has those that it uses.
var (
	onGPUs     = []string{"device", "library", "sim", "timeout"}
	asResult   = []string{"format", "no-host-name", "output", "quiet", "verbose"}
	ofFindings = []string{"expect-bandwidth", "expect-gpus", "fail-on", "ignore"}
)

// sharedFlags are the kinds of the values of these flags in the help, empty for that of the type, and the values that the
// shell offers, nil for files.
var sharedFlags = map[string]struct {
	kind   string
	values []string
}{
	"device":           {"", []string{"all"}},
	"expect-bandwidth": {"GBPS", []string{}},
	"expect-gpus":      {"N", []string{}},
	"fail-on":          {"SEVERITY", texts(doctor.Severities())},
	"format":           {"FORMAT", texts(report.Formats())},
	"ignore":           {"ID", checkIDs()},
	"library":          {"PATH", nil},
	"no-host-name":     {},
	"output":           {"FILE", nil},
	"quiet":            {},
	"sim":              {},
	"timeout":          {"TIME", []string{}},
	"verbose":          {},
}

// flags returns all of these flags.
func (o *options) flags() *pflag.FlagSet {
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	f.Var(&o.devices, "device", "GPUs by number, UUID or PCI address (default: all)")
	f.Float64Var(&o.expectRate, "expect-bandwidth", 0, "rate that pinned copies should reach each way (default: the reference for this type of machine)")
	f.IntVar(&o.expectGPUs, "expect-gpus", 0, "number of GPUs that should be present (default: those on the PCI bus)")
	f.StringVar(&o.failAt, "fail-on", string(doctor.Warning), "lowest severity that changes the exit status: problem, warning or note")
	f.StringVar(&o.format, "format", string(report.Text), "text, json, jsonl, prometheus, csv or html")
	f.StringSliceVar(&o.ignore, "ignore", nil, "leave out this finding; repeatable")
	f.StringVar(&o.library, "library", "", "libcudart or libcuda to load (default: PINNED_CUDART, or found by search)")
	f.BoolVar(&o.noHostName, "no-host-name", false, "leave out the host name")
	f.StringVarP(&o.output, "output", "o", "", "write to FILE, atomically (default: standard output)")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "no progress on standard error")
	f.BoolVar(&o.sim, "sim", false, "use a simulated GPU")
	f.DurationVar(&o.timeout, "timeout", 0, "stop after TIME, such as 30s, and report what was found so far")
	f.BoolVar(&o.verbose, "verbose", false, "show samples, notes, passed checks and the library search")
	return f
}

// share gives a command shared flags.
func (o *options) share(cmd *cobra.Command, groups ...[]string) {
	all := o.flags()
	for _, name := range slices.Concat(groups...) {
		cmd.Flags().AddFlag(all.Lookup(name))
		f := sharedFlags[name]
		if f.kind != "" {
			named(cmd.Flags(), name, f.kind)
		}
		if f.values != nil {
			complete(cmd, name, f.values...)
		}
	}
}

// formats gives a command --format with some formats alone.
func (o *options) formats(cmd *cobra.Command, can ...report.Format) {
	cmd.Flags().AddFlag(o.flags().Lookup("format"))
	named(cmd.Flags(), "format", sharedFlags["format"].kind)
	list, _ := choice(can)
	cmd.Flags().Lookup("format").Usage = list
	complete(cmd, "format", can...)
}

// complete offers the values of a flag to the shell. It fails only for a flag that does
// not exist, which a test would notice.
func complete[T ~string](cmd *cobra.Command, flag string, values ...T) {
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(texts(values), cobra.ShellCompDirectiveNoFileComp))
}

func texts[T ~string](values []T) (out []string) {
	for _, v := range values {
		out = append(out, string(v))
	}
	return out
}

// A flagText is a flag with a name for the kind of its values, such as TIME, which pflag lacks. The
// help shows the name; back quotes in the usage text would show up in shell completions.
type flagText struct {
	pflag.Value
	kind string
}

func (f flagText) Type() string { return f.kind }

// named sets the name of a flag's value in the help, and drops default values that mean none.
func named(flags *pflag.FlagSet, flag, kind string) {
	f := flags.Lookup(flag)
	f.Value = flagText{f.Value, kind}
	if f.DefValue == "0s" || f.DefValue == "[]" || f.DefValue == "0" {
		f.DefValue = ""
	}
}

// flagError is the error of a flag, in words of the command instead of those of package strconv.
func flagError(cmd *cobra.Command, err error) error {
	unknown, invalid := (*pflag.NotExistError)(nil), (*pflag.InvalidValueError)(nil)
	switch {
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "":
		return unknownFlag(cmd, unknown.GetSpecifiedName())
	case !errors.As(err, &invalid):
		return usageError{err}
	}
	name := invalid.GetFlag().Name
	number, cause := (*strconv.NumError)(nil), errors.Unwrap(invalid)
	want := ""
	switch {
	case errors.As(cause, &number) && errors.Is(cause, strconv.ErrRange):
		want = "the number is too large"
	case errors.As(cause, &number) && number.Func == "ParseFloat":
		want = "want a number, such as 2.5"
	case errors.As(cause, &number) && number.Func == "ParseBool":
		want = "want true or false"
	case errors.As(cause, &number):
		want = "want a whole number"
	case strings.HasPrefix(cause.Error(), "time: "):
		want = "want a time with its unit, such as 500ms, 30s or 2m"
	default:
		return usagef("--%s: %w", name, cause)
	}
	return usagef("--%s %q: %s", name, invalid.GetValue(), want)
}

// unknownFlag is the error for a flag that a command lacks. It suggests one that is spelled alike, or
// names the commands that have it.
func unknownFlag(cmd *cobra.Command, name string) error {
	var names, others []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		if c != cmd && c.IsAvailableCommand() && c.Flags().Lookup(name) != nil {
			others = append(others, strings.TrimPrefix(c.CommandPath(), "pincheck "))
		}
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	for _, c := range cmd.Root().Commands() {
		visit(c)
	}
	// Experiments have what bench has; check is the root.
	others = slices.DeleteFunc(others, func(path string) bool {
		parent, _, ok := strings.Cut(path, " ")
		return ok && slices.Contains(others, parent)
	})
	switch closest := nearest(name, names); {
	case len(others) == 1:
		return usagef("no flag --%s: it belongs to %s", name, others[0])
	case len(others) > 1:
		why := ""
		if name == "sim" && cmd.Name() == "watch" {
			why = ": watch only reads this host and starts no GPU"
		}
		return usagef("no flag --%s%s.\nCommands with --%s: %s", name, why, name, strings.Join(others, ", "))
	case closest != "":
		return usagef("unknown flag --%s. Did you mean --%s?", name, closest)
	}
	return usagef("unknown flag --%s", name)
}

// given returns the flags among names that the command line has, with their dashes.
func given(cmd *cobra.Command, names ...string) (set []string) {
	for _, name := range names {
		if cmd.Flags().Changed(name) {
			set = append(set, "--"+name)
		}
	}
	return set
}

// wrongValue is the error for a value of a fixed list.
func wrongValue[T ~string](flag, value string, want []T) error {
	list, texts := choice(want)
	if closest := nearest(value, texts); closest != "" {
		return usagef("--%s %s: want %s. Did you mean %s?", flag, value, list, closest)
	}
	return usagef("--%s %s: want %s", flag, value, list)
}

// choice returns values as a list in words, and as texts.
func choice[T ~string](values []T) (list string, all []string) {
	all = texts(values)
	last := len(all) - 1
	return strings.Join(all[:last], ", ") + " or " + all[last], all
}

// nearest returns the name with the lowest edit distance, if that is below 3 and at most half of the
// letters differ, or "".
func nearest(name string, names []string) string {
	best, fewest := "", 3
	for _, n := range names {
		if d := distance(strings.ToLower(name), n); d < fewest && 2*d <= len(name) {
			best, fewest = n, d
		}
	}
	return best
}

// distance returns the edit distance (Levenshtein) between a and b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal = row[j+1]
			row[j+1] = min(replaced, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}

// isShared reports whether a flag is one that commands share.
func isShared(f *pflag.Flag) bool {
	_, ok := sharedFlags[f.Name]
	return ok
}

// flagList returns the help of the flags that fit, 80 columns wide, with --help last.
func flagList(cmd *cobra.Command, fits func(*pflag.Flag) bool) string {
	list := pflag.NewFlagSet("", pflag.ContinueOnError)
	list.SortFlags = false
	var help *pflag.Flag
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		switch {
		case f.Name == "help":
			help = f
		case fits(f):
			list.AddFlag(f)
		}
	})
	if help != nil && fits(help) {
		help.Usage = "show this help"
		list.AddFlag(help)
	}
	return list.FlagUsagesWrapped(helpWidth)
}

// helpWidth is the width of help texts in columns.
const helpWidth = 80
