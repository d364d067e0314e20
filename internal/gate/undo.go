package gate

import "context"

// Undo releases what was made for a caller who does not get it, whether ctx has ended or
// not. It tries twice, as nobody else can: CUDA reports each error of other work once.
func Undo(ctx context.Context, release func(context.Context) error) error {
	ctx = context.WithoutCancel(ctx)
	if release(ctx) == nil {
		return nil
	}
	return release(ctx)
}
