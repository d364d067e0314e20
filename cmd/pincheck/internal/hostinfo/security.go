package hostinfo

import (
	"bytes"
	"strings"
)

// Security is what may refuse a device or a kernel module whatever the files' modes say.
type Security struct {
	// SELinux is that it enforces its policy; nil if it does not show. Confinement is the domain of SELinux or
	// the profile of AppArmor that the process runs in: container_t, docker-default.
	SELinux     *bool  `json:"selinux_enforcing,omitempty"`
	Confinement string `json:"confinement,omitempty"`
	// SecureBoot is that the firmware lets only signed code boot: the kernel then takes no unsigned modules.
	SecureBoot *bool `json:"secure_boot,omitempty"`
	// Lockdown is none, integrity or confidentiality.
	Lockdown string `json:"lockdown,omitempty"`
}

func readSecurity(f files) (s Security) {
	switch f.line("sys/fs/selinux/enforce") {
	case "1":
		enforces := true
		s.SELinux = &enforces
	case "0":
		s.SELinux = new(bool)
	}
	context := strings.Trim(f.line("proc/self/attr/current"), "\x00")
	if fields := strings.Split(context, ":"); len(fields) >= 4 {
		context = fields[2] // of user:role:type:level
	}
	if context != "unconfined" {
		s.Confinement = context
	}
	// Four bytes of attributes, and one with the value.
	const secureBoot = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
	if value := []byte(f.text(secureBoot)); len(bytes.TrimRight(value, "\n")) >= 5 {
		on := value[4] == 1 || value[4] == '1' // of a recording
		s.SecureBoot = &on
	}
	if _, chosen, ok := strings.Cut(f.line("sys/kernel/security/lockdown"), "["); ok {
		s.Lockdown, _, _ = strings.Cut(chosen, "]")
	}
	return s
}
