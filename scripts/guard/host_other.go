//go:build !linux

package main

import (
	"errors"
	"os"
	"os/exec"
	"time"
)

func cpuTime() time.Duration                      { return 0 }
func startOn(*exec.Cmd, int) error                { return errors.ErrUnsupported }
func mapUntouched(int) ([]byte, error)            { return nil, errors.ErrUnsupported }
func unmap([]byte) error                          { return errors.ErrUnsupported }
func freeBytes(string) (int, error)               { return 0, errors.ErrUnsupported }
func dropPages(*os.File, int) (stay int, _ error) { return 0, errors.ErrUnsupported }
