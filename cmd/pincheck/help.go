package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Annotations of commands, beside cobra's fields.
const (
	exitNote = "exit"    // a line about the exit status
	related  = "related" // what to read next
)

// exitStatus is the topic exit-status of pincheck help.
const exitStatus = `  0    healthy, or measured
  1    problems found, or something failed
  3    no usable GPU
  4    incomplete: stopped by --timeout; what was found is printed
  5    warnings, no problems
  6    inconclusive: no findings, and no GPU was measured
  64   wrong usage
  74   the output could not be written
  130  interrupted; what was found is printed
`

// Notes about the exit status, by what a command does.
const (
	checkExit   = "Exit status: 0 healthy, 5 warnings, 1 problems, 3 no usable GPU."
	measureExit = "Exit status: 0 measured, 1 something failed, 3 no usable GPU."
)

// writeHelp writes the help of a command.
func writeHelp(w io.Writer, cmd *cobra.Command) error {
	var b strings.Builder
	if cmd.Name() == "exit-status" {
		_, err := io.WriteString(w, exitStatus)
		return err
	}
	text := cmd.Long
	if text == "" {
		text = cmd.Short + "."
	}
	b.WriteString(strings.TrimSpace(text) + "\n\nUsage:\n  " + usageLine(cmd) + "\n")
	if cmd.Example != "" {
		b.WriteString("\nExamples:\n" + strings.Trim(cmd.Example, "\n") + "\n")
	}
	writeCommands(&b, cmd)
	own := func(f *pflag.Flag) bool { return !isShared(f) && f.Name != "help" }
	switch section := flagList(cmd, own); {
	case cmd.Name() == "pincheck" || cmd.Name() == "check" || section == "":
		section = flagList(cmd, func(*pflag.Flag) bool { return true })
		b.WriteString("\nFlags:\n" + section)
	default:
		b.WriteString("\nFlags:\n" + section)
		b.WriteString("\nCommon flags:\n" + flagList(cmd, func(f *pflag.Flag) bool { return !own(f) }))
	}
	if note := cmd.Annotations[exitNote]; note != "" {
		fmt.Fprintf(&b, "\n%s\nAll of them: pincheck help exit-status\n", note)
	}
	if note := cmd.Annotations[related]; note != "" {
		b.WriteString("\nRelated: " + note + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func usageLine(cmd *cobra.Command) string {
	line := cmd.UseLine()
	if !cmd.HasParent() {
		line = strings.Replace(line, " [flags]", " [COMMAND] [flags]", 1)
	}
	return line
}

// writeCommands lists the subcommands by their groups. Those without a group are in a line at the end.
func writeCommands(b *strings.Builder, cmd *cobra.Command) {
	for _, group := range cmd.Groups() {
		title := "\n" + group.Title + "\n"
		for _, c := range cmd.Commands() {
			if c.GroupID == group.ID && c.IsAvailableCommand() {
				fmt.Fprintf(b, "%s  %-*s  %s\n", title, c.NamePadding()-1, c.Name(), c.Short)
				title = ""
			}
		}
	}
	var others []string
	for _, c := range cmd.Commands() {
		if c.GroupID == "" && c.IsAvailableCommand() || c.Name() == "help" {
			others = append(others, c.Name())
		}
	}
	if cmd.HasParent() {
		for _, name := range others {
			c, _, _ := cmd.Find([]string{name})
			fmt.Fprintf(b, "\n  %-*s  %s\n", c.NamePadding()-1, name, c.Short)
		}
		return
	}
	if len(others) > 0 {
		fmt.Fprintf(b, "\nOther commands: %s\n", strings.Join(others, ", "))
	}
}

// strict makes unknown topics of help and shells of completion wrong usage, which cobra's
// own commands do not. The output must be set: completion keeps it.
func strict(root *cobra.Command) {
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) {
		_ = writeHelp(cmd.OutOrStdout(), cmd) // as cobra's, it has nobody to report to
	})
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		switch c.Name() {
		case "help":
			c.Run = nil
			c.RunE = help
		case "completion":
			c.Args = noArgs
			c.Long = "Print a script that completes pincheck's commands and flags in a shell."
			c.RunE = func(*cobra.Command, []string) error {
				return usagef("name a shell: bash, zsh, fish or powershell")
			}
			for _, shell := range c.Commands() {
				write := shell.RunE
				shell.RunE = func(cmd *cobra.Command, args []string) error {
					return afterWriting(write(cmd, args))
				}
			}
		}
	}
}

func help(cmd *cobra.Command, args []string) error {
	c, rest, err := cmd.Root().Find(args)
	if err == nil && len(rest) > 0 {
		err = noArgs(c, rest)
	}
	if err != nil {
		return usageError{err}
	}
	c.InitDefaultHelpFlag()
	return afterWriting(writeHelp(cmd.OutOrStdout(), c))
}

// noArgs refuses arguments, and suggests a command where the first of them may be meant as one.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if cmd.HasSubCommands() {
		var names []string
		for _, c := range cmd.Commands() {
			names = append(names, c.Name())
		}
		if closest := nearest(args[0], names); closest != "" {
			return usagef("unknown command %q. Did you mean %s?", args[0], closest)
		}
		return usagef("unknown command %q", args[0])
	}
	return usagef("%s takes no argument, and got %q", cmd.Name(), args[0])
}
