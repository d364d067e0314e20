package main

import (
	"embed"
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
//
//go:embed help/exit-status.txt
var exitStatus string

// measureExit is the note about the exit status of experiments.
const measureExit = "Exit status: 0 measured, 1 something failed, 3 no usable GPU."

// pages are the texts of commands, by their names: the summary, which is also the first line of the help, what the help
// says below it, examples, and what annotations have.
//
//go:embed help
var pages embed.FS

// newCommand returns a command with the texts of its page.
func newCommand(use string) *cobra.Command {
	name, _, _ := strings.Cut(use, " ")
	text, err := pages.ReadFile("help/" + name + ".txt")
	if err != nil {
		panic(err) // a mistake in this program, whose every start would end here
	}
	rest, next, _ := strings.Cut(string(text), "\nRelated: ")
	rest, exit, _ := strings.Cut(rest, "\nExit status: ")
	rest, examples, _ := strings.Cut(rest, "\nExamples:\n")
	short, long, _ := strings.Cut(rest, "\n")
	cmd := &cobra.Command{
		Use: use, Short: short, Long: strings.ToUpper(short[:1]) + short[1:] + ".\n" + long, Example: examples,
		Annotations: map[string]string{related: strings.TrimSpace(next)},
	}
	if exit != "" {
		cmd.Annotations[exitNote] = "Exit status: " + strings.TrimSpace(exit)
	}
	return cmd
}

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
