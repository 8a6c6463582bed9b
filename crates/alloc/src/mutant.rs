//! Deliberate defects that the loom models must find, each named by its model's letter. In every
//! other build there are none.

#[cfg(not(all(test, loom)))]
#[inline(always)]
pub(crate) const fn mutated(_: char) -> bool {
    false
}

#[cfg(all(test, loom))]
pub(crate) use on::*;

#[cfg(all(test, loom))]
mod on {
    use std::cell::Cell;

    thread_local! {
        // Loom runs all threads of a model on one.
        static DEFECT: Cell<char> = const { Cell::new(' ') };
    }

    pub(crate) fn mutated(which: char) -> bool {
        DEFECT.get() == which
    }

    /// Runs `f` with a defect.
    pub(crate) fn with_defect<T>(which: char, f: impl FnOnce() -> T) -> T {
        DEFECT.set(which);
        let result = f();
        DEFECT.set(' ');
        result
    }
}
