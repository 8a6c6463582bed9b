//! Misuses of the API, by name. Each one is counted and has no effect; none is fatal.

use std::fmt;

/// A kind of misuse. The manager counts each kind per thread and in total (`tl_mem_stats`), and
/// keeps the newest misuse for `tl_mem_last_error`.
///
/// The numbers are part of the C ABI (`TL_MISUSE_*`); new kinds are added at the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum Misuse {
    /// `exit_scope` without a matching `enter_scope` in this function, thread or destructor.
    ExitScope = 0,
    /// `function_exit` without a matching `function_enter`.
    FunctionExit = 1,
    /// `function_enter` with a negative or excessive number of slots.
    SlotCount = 2,
    /// `get_buffer` outside any function.
    NoFrame = 3,
    /// `get_buffer` with a slot that the frame does not have.
    SlotIndex = 4,
    /// A negative size, or one beyond the address space.
    Size = 5,
    /// Release of an unknown address.
    ReleaseUnknown = 6,
    /// Release or acquire of a dead tensor.
    UseOfDead = 7,
    /// `register_ptr` of an unknown address.
    RegisterUnknown = 8,
    /// Registration of a dead tensor (it is revived if possible).
    RegisterDead = 9,
    /// A call named another kind than the object's.
    KindMismatch = 10,
    /// `unregister` or `promote` of an address without a record.
    NotRegistered = 11,
    /// `unwind` to a mark that does not enclose the present position.
    Mark = 12,
    /// The key of a tensor whose size is beyond the address space.
    TensorKey = 13,
    /// The request found no memory.
    OutOfMemory = 14,
    /// A scope that stayed open and was closed by `function_exit`, by an outer `exit_scope` or
    /// after a destructor.
    ScopeRepaired = 15,
    /// A frame whose function returned without `function_exit`, closed on its behalf.
    FrameRepaired = 16,
    /// A tensor without a destructor died; its memory is lost.
    NoDestructor = 17,
}

/// The number of kinds of [`Misuse`].
pub const MISUSE_COUNT: usize = 18;

impl Misuse {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; MISUSE_COUNT] = [
        Self::ExitScope,
        Self::FunctionExit,
        Self::SlotCount,
        Self::NoFrame,
        Self::SlotIndex,
        Self::Size,
        Self::ReleaseUnknown,
        Self::UseOfDead,
        Self::RegisterUnknown,
        Self::RegisterDead,
        Self::KindMismatch,
        Self::NotRegistered,
        Self::Mark,
        Self::TensorKey,
        Self::OutOfMemory,
        Self::ScopeRepaired,
        Self::FrameRepaired,
        Self::NoDestructor,
    ];

    /// A short name for tables and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ExitScope => "exit_scope",
            Self::FunctionExit => "function_exit",
            Self::SlotCount => "slot_count",
            Self::NoFrame => "no_frame",
            Self::SlotIndex => "slot_index",
            Self::Size => "size",
            Self::ReleaseUnknown => "release_unknown",
            Self::UseOfDead => "use_of_dead",
            Self::RegisterUnknown => "register_unknown",
            Self::RegisterDead => "register_dead",
            Self::KindMismatch => "kind_mismatch",
            Self::NotRegistered => "not_registered",
            Self::Mark => "mark",
            Self::TensorKey => "tensor_key",
            Self::OutOfMemory => "out_of_memory",
            Self::ScopeRepaired => "scope_repaired",
            Self::FrameRepaired => "frame_repaired",
            Self::NoDestructor => "no_destructor",
        }
    }

    const fn explanation(self) -> &'static str {
        match self {
            Self::ExitScope => "exit_scope without a matching enter_scope; ignored",
            Self::FunctionExit => "function_exit without a matching function_enter; ignored",
            Self::SlotCount => {
                "function_enter with an impossible number of slots; the frame has none"
            }
            Self::NoFrame => "get_buffer outside any function; call function_enter first",
            Self::SlotIndex => "get_buffer with a slot that this frame does not have",
            Self::Size => "a size that is negative or too large",
            Self::ReleaseUnknown => {
                "release of an address that was never registered, or was freed already; ignored"
            }
            Self::UseOfDead => "acquire or release of a tensor that is dead already; ignored",
            Self::RegisterUnknown => {
                "register_ptr of an unknown address; register it with its kind first"
            }
            Self::RegisterDead => "registration of a tensor whose count had reached zero",
            Self::KindMismatch => "the object was registered as another kind; the first kind stays",
            Self::NotRegistered => "no scope of this thread holds a record of this address",
            Self::Mark => "unwind to a mark that does not enclose the present position; ignored",
            Self::TensorKey => "the key of a tensor whose size is beyond the address space",
            Self::OutOfMemory => "no memory for the request; nothing was changed",
            Self::ScopeRepaired => "a scope was left open and has been closed",
            Self::FrameRepaired => {
                "a function returned without function_exit; its frame has been closed"
            }
            Self::NoDestructor => "a tensor died without a destructor hook; its memory is lost",
        }
    }
}

/// The newest misuse of a thread, with its arguments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LastError {
    /// The kind.
    pub misuse: Misuse,
    /// The address argument, 0 if none.
    pub address: usize,
    /// The number argument (slot, size, mark, count), or 0.
    pub value: i64,
}

impl fmt::Display for LastError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { misuse, address, value } = self;
        write!(
            f,
            "{}: {} (pointer {address:#x}, value {value})",
            misuse.name(),
            misuse.explanation()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_positions() {
        for (i, m) in Misuse::ALL.into_iter().enumerate() {
            assert_eq!(m as usize, i);
        }
    }
}
