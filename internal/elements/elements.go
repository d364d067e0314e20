// Package elements checks types whose values are copied to and from devices byte for byte.
package elements

import (
	"errors"
	"fmt"
	"reflect"
	"sync"
)

var checked sync.Map // of result, by reflect.Type

// Check returns an error unless values of T can be copied as bytes: numbers, and arrays and
// structs of them, of one byte at least. Pointers mean nothing to another processor, and the
// garbage collector must not find bytes of a device in their place. A bool is refused
// because only the bytes 0 and 1 are one. Each type is reflected on once; then Check allocates
// nothing.
func Check[T any]() error {
	t := reflect.TypeFor[T]()
	if cached, ok := checked.Load(t); ok {
		return cached.(result).err
	}
	err := check(t)
	switch {
	case err != nil:
		err = fmt.Errorf("elements of type %v: %w", t, err)
	case t.Size() == 0:
		err = fmt.Errorf("elements of type %v have no bytes", t)
	}
	checked.Store(t, result{err})
	return err
}

type result struct{ err error }

func check(t reflect.Type) error {
	switch k := t.Kind(); {
	case k == reflect.Bool:
		return errors.New("a bool may not have any byte: use uint8")
	case k <= reflect.Complex128 && k != reflect.Invalid:
		return nil
	case k == reflect.Array:
		return check(t.Elem())
	case k == reflect.Struct:
		for i := range t.NumField() {
			if err := check(t.Field(i).Type); err != nil {
				return fmt.Errorf("field %s: %w", t.Field(i).Name, err)
			}
		}
		return nil
	}
	return fmt.Errorf("a %v holds pointers", t)
}
