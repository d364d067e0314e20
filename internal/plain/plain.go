// Package plain reports which types are bytes alone, so that their values can be copied to
// a device and back.
package plain

import (
	"errors"
	"fmt"
	"reflect"
	"sync"
)

// checked has the result of each type that was checked.
var checked sync.Map // of reflect.Type to result

type result struct{ err error }

// Check returns an error if values of T hold pointers, or have no bytes. Numbers, bool, and
// arrays and structs of these have none. A type is examined once; after that Check does not
// allocate.
func Check[T any]() error {
	t := reflect.TypeFor[T]()
	if r, ok := checked.Load(t); ok {
		return r.(result).err
	}
	err := examine(t, t.String())
	if err == nil && t.Size() == 0 {
		err = errors.New(t.String() + " has no bytes")
	}
	checked.Store(t, result{err})
	return err
}

// examine returns an error that names the first pointer in a type, which is at a path.
func examine(t reflect.Type, path string) error {
	switch t.Kind() {
	case reflect.Array:
		return examine(t.Elem(), path+"[]")
	case reflect.Struct:
		for i := range t.NumField() {
			if err := examine(t.Field(i).Type, path+"."+t.Field(i).Name); err != nil {
				return err
			}
		}
	case reflect.Chan, reflect.Func, reflect.Interface, reflect.Map, reflect.Pointer, reflect.Slice, reflect.String, reflect.UnsafePointer:
		return fmt.Errorf("%s is a %v, which holds a pointer to host memory", path, t.Kind())
	}
	return nil
}
