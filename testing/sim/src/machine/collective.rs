//! Calls of ranks, and what they compute: pure functions over bytes.
//!
//! Values are reduced in the order of the ranks, so results are equal on all ranks. Numbers of 16
//! bits are reduced in `f32`, and rounded once.
//!
//! # Wrong programs
//! [`results`] also has what NCCL was seen to do with calls that do not fit each other. A rank
//! takes the bytes that its own call asks for, as far as the others send them. Where reductions
//! differ, each part of the result has the reduction of its owner, one of the ranks. A rank whose
//! peers do not send at all hangs.
//!
//! This module must not know queues, addresses in use or time.

use half::{bf16, f16};
use leasehold_core::{Error, Result};
use std::fmt;
use std::ops::Range;

/// The type of the elements of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Element {
    /// Unsigned, 8 bits.
    U8,
    /// Signed, 8 bits.
    I8,
    /// Unsigned, 16 bits.
    U16,
    /// Signed, 16 bits.
    I16,
    /// Unsigned, 32 bits.
    U32,
    /// Signed, 32 bits.
    I32,
    /// Unsigned, 64 bits.
    U64,
    /// Signed, 64 bits.
    I64,
    /// IEEE half precision.
    F16,
    /// The upper half of an `f32`.
    Bf16,
    /// Single precision.
    F32,
    /// Double precision.
    F64,
}

impl Element {
    /// All types.
    pub const ALL: [Element; 12] = [
        Element::U8,
        Element::I8,
        Element::U16,
        Element::I16,
        Element::U32,
        Element::I32,
        Element::U64,
        Element::I64,
        Element::F16,
        Element::Bf16,
        Element::F32,
        Element::F64,
    ];

    /// Bytes of an element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Element::U8 | Element::I8 => 1,
            Element::U16 | Element::I16 | Element::F16 | Element::Bf16 => 2,
            Element::U32 | Element::I32 | Element::F32 => 4,
            Element::U64 | Element::I64 | Element::F64 => 8,
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Element::U8 => "u8",
            Element::I8 => "i8",
            Element::U16 => "u16",
            Element::I16 => "i16",
            Element::U32 => "u32",
            Element::I32 => "i32",
            Element::U64 => "u64",
            Element::I64 => "i64",
            Element::F16 => "f16",
            Element::Bf16 => "bf16",
            Element::F32 => "f32",
            Element::F64 => "f64",
        })
    }
}

/// How values of all ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduction {
    /// The sum; of integers, modulo their range.
    Sum,
    /// The product; of integers, modulo their range.
    Product,
    /// The least value.
    Least,
    /// The largest value.
    Largest,
    /// The sum, divided by the number of ranks; of integers, rounded towards zero.
    Average,
}

impl Reduction {
    /// All reductions.
    pub const ALL: [Reduction; 5] = [
        Reduction::Sum,
        Reduction::Product,
        Reduction::Least,
        Reduction::Largest,
        Reduction::Average,
    ];
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reduction::Sum => "Sum",
            Reduction::Product => "Product",
            Reduction::Least => "Least",
            Reduction::Largest => "Largest",
            Reduction::Average => "Average",
        })
    }
}

/// An operation that the ranks of a communicator do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CommOp {
    /// Each rank gets the reduction of all.
    AllReduce(Reduction),
    /// Each rank gets the parts of all, in their order.
    AllGather,
    /// Each rank gets its part of the reduction of all.
    ReduceScatter(Reduction),
    /// Each other rank gets what the root has.
    Broadcast {
        /// The rank that sends.
        root: u32,
    },
    /// The root gets the reduction of all.
    Reduce {
        /// The reduction.
        reduction: Reduction,
        /// The rank that receives.
        root: u32,
    },
    /// Each rank gets its part of each rank's elements, in the order of the ranks.
    AllToAll,
    /// Sends to one rank, which receives.
    Send {
        /// The rank that receives.
        to: u32,
    },
    /// Receives from one rank, which sends.
    Recv {
        /// The rank that sends.
        from: u32,
    },
    /// No rank goes on before all have come.
    Barrier,
}

/// A rank's part of what the ranks do together. A range that the call does not use has any address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommCall {
    /// The operation.
    pub op: CommOp,
    /// The type of the elements.
    pub element: Element,
    /// Elements: of the whole for `AllReduce`, `Broadcast`, `Reduce`, `Send` and `Recv`; of one
    /// rank's part for `AllGather`, `ReduceScatter` and `AllToAll`; none for `Barrier`.
    pub count: u64,
    /// The address of the elements that the rank sends.
    pub send: u64,
    /// The address of the elements that the rank receives. It may be `send`; of `AllGather` and
    /// `ReduceScatter`, one may be the rank's part of the other.
    pub recv: u64,
}

impl fmt::Display for CommCall {
    /// `all_reduce 4096 bf16 Sum`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.op {
            CommOp::AllReduce(_) => "all_reduce",
            CommOp::AllGather => "all_gather",
            CommOp::ReduceScatter(_) => "reduce_scatter",
            CommOp::Broadcast { .. } => "broadcast",
            CommOp::Reduce { .. } => "reduce",
            CommOp::AllToAll => "all_to_all",
            CommOp::Send { .. } => "send",
            CommOp::Recv { .. } => "recv",
            CommOp::Barrier => return f.write_str("barrier"),
        })?;
        write!(f, " {} {}", self.count, self.element)?;
        match self.op {
            CommOp::AllReduce(reduction) | CommOp::ReduceScatter(reduction) => {
                write!(f, " {reduction}")
            }
            CommOp::Reduce { reduction, root } => write!(f, " {reduction} root {root}"),
            CommOp::Broadcast { root } => write!(f, " root {root}"),
            CommOp::Send { to } => write!(f, " to {to}"),
            CommOp::Recv { from } => write!(f, " from {from}"),
            CommOp::AllGather | CommOp::AllToAll | CommOp::Barrier => Ok(()),
        }
    }
}

impl CommCall {
    /// The reduction, if the call has one.
    pub(crate) fn reduction(&self) -> Option<Reduction> {
        match self.op {
            CommOp::AllReduce(r) | CommOp::ReduceScatter(r) => Some(r),
            CommOp::Reduce { reduction, .. } => Some(reduction),
            _ => None,
        }
    }

    /// Elements that a rank of `size` sends and receives.
    fn counts(&self, rank: u32, size: u32) -> (u64, u64) {
        let (one, all) = (self.count, self.count.saturating_mul(u64::from(size)));
        let only = |yes: bool| if yes { one } else { 0 };
        match self.op {
            CommOp::AllReduce(_) => (one, one),
            CommOp::AllGather => (one, all),
            CommOp::ReduceScatter(_) => (all, one),
            CommOp::Broadcast { root } => (only(root == rank), only(root != rank)),
            CommOp::Reduce { root, .. } => (one, only(root == rank)),
            CommOp::AllToAll => (all, all),
            CommOp::Send { .. } => (one, 0),
            CommOp::Recv { .. } => (0, one),
            CommOp::Barrier => (0, 0),
        }
    }

    /// The ranges that a rank reads and writes.
    pub(crate) fn ranges(&self, rank: u32, size: u32) -> [Range<u64>; 2] {
        let (send, recv) = self.counts(rank, size);
        [(self.send, send), (self.recv, recv)]
            .map(|(at, count)| at..at.saturating_add(count.saturating_mul(self.element.bytes())))
    }

    /// The sender and the receiver of a transfer between two ranks.
    pub(crate) fn pair(&self, rank: u32) -> Option<(u32, u32)> {
        match self.op {
            CommOp::Send { to } => Some((rank, to)),
            CommOp::Recv { from } => Some((from, rank)),
            _ => None,
        }
    }

    pub(crate) fn is_send(&self) -> bool {
        matches!(self.op, CommOp::Send { .. })
    }

    /// The other rank of a transfer between two.
    pub(crate) fn peer(&self) -> Option<u32> {
        match self.op {
            CommOp::Send { to } => Some(to),
            CommOp::Recv { from } => Some(from),
            _ => None,
        }
    }

    /// Whether two ranks' calls fit each other.
    pub(crate) fn fits(&self, other: &CommCall) -> bool {
        let same_op = match (self.op, other.op) {
            (CommOp::Send { .. }, CommOp::Recv { .. }) => true,
            (a, b) => a == b,
        };
        same_op
            && (self.op == CommOp::Barrier
                || self.count == other.count && self.element == other.element)
    }

    pub(crate) fn check(&self, rank: u32, size: u32) -> Result<()> {
        let named = match self.op {
            CommOp::Broadcast { root } | CommOp::Reduce { root, .. } => Some(root),
            _ => self.peer(),
        };
        if let Some(other) = named.filter(|&other| other >= size) {
            return Err(Error::invalid(format!(
                "{self}: the communicator has {size} ranks, so none is {other}"
            )));
        }
        let (send, recv) = self.counts(rank, size);
        let bytes = self.element.bytes();
        for (what, at, count) in [("sends", self.send, send), ("receives", self.recv, recv)] {
            let end = count.checked_mul(bytes).and_then(|bytes| at.checked_add(bytes));
            // A product that was cut has this value.
            if end.is_none() || count == u64::MAX {
                return Err(Error::invalid(format!(
                    "{self}: what rank {rank} {what} at {at:#x} wraps the address space"
                )));
            }
            if count != 0 && !at.is_multiple_of(bytes) {
                return Err(Error::invalid(format!(
                    "{self}: what rank {rank} {what} at {at:#x} is not aligned to {bytes} bytes"
                )));
            }
        }
        Ok(())
    }

    /// Bytes that a rank's link moves.
    pub(crate) fn moved(&self, size: u32) -> u64 {
        let (bytes, n) = (self.count.saturating_mul(self.element.bytes()), u64::from(size));
        match self.op {
            CommOp::AllReduce(_) => (bytes / n).saturating_mul(2 * (n - 1)),
            CommOp::AllGather | CommOp::ReduceScatter(_) | CommOp::AllToAll => {
                bytes.saturating_mul(n - 1)
            }
            CommOp::Broadcast { .. } | CommOp::Reduce { .. } if n == 1 => 0,
            CommOp::Broadcast { .. }
            | CommOp::Reduce { .. }
            | CommOp::Send { .. }
            | CommOp::Recv { .. } => bytes,
            CommOp::Barrier => 0,
        }
    }

    /// Whether the call of `rank` ends only after data from the rank `other`. The rank then knows
    /// of the other one's past. It hears itself.
    pub(crate) fn hears(&self, rank: u32, other: u32) -> bool {
        rank == other
            || match self.op {
                CommOp::Broadcast { root } => root == other,
                CommOp::Reduce { root, .. } => root == rank,
                CommOp::Recv { from } => from == other,
                CommOp::Send { .. } => false,
                _ => true,
            }
    }

    /// Whether the call of `rank` sends to every rank that waits for it, whatever that one calls.
    /// Calls in which each rank waits for each are satisfied by such calls alone.
    fn sends(&self, rank: u32) -> bool {
        match self.op {
            CommOp::Broadcast { root } => root == rank,
            CommOp::Reduce { root, .. } => root != rank,
            _ => true,
        }
    }

    fn is_rooted(&self) -> bool {
        matches!(self.op, CommOp::Broadcast { .. } | CommOp::Reduce { .. })
    }

    /// Whether `rank` waits for ever, given the calls of all ranks.
    fn hangs(&self, rank: u32, calls: &[CommCall]) -> bool {
        let mut others = (0..).zip(calls).filter(|&(other, _)| other != rank);
        match self.op {
            _ if !self.is_rooted() => others.any(|(_, call)| call.is_rooted()),
            _ => others.any(|(other, call)| self.hears(rank, other) && !call.sends(other)),
        }
    }
}

/// Bytes to write, each with its offset in the range that the rank receives.
pub(crate) type Output = Vec<(u64, Vec<u8>)>;

/// The bytes that each rank receives, given the calls of all ranks and the bytes that each sends.
/// `None` for a rank that waits for ever.
pub(crate) fn results(calls: &[CommCall], inputs: &[Vec<u8>]) -> Vec<Option<Output>> {
    (0..)
        .zip(calls)
        .map(
            |(rank, call)| {
                if call.hangs(rank, calls) { None } else { Some(result(rank, calls, inputs)) }
            },
        )
        .collect()
}

fn result(rank: u32, calls: &[CommCall], inputs: &[Vec<u8>]) -> Output {
    let call = &calls[rank as usize];
    let bytes = call.count.saturating_mul(call.element.bytes()) as usize;
    let part = |of: usize, index: u32| window(&inputs[of], index as usize * bytes, bytes);
    let gathered = |index: u32| {
        (0..inputs.len()).map(|of| ((of * bytes) as u64, part(of, index).to_vec())).collect()
    };
    match call.op {
        CommOp::AllReduce(_) => reduced(call, calls, inputs, 0),
        CommOp::ReduceScatter(_) => reduced(call, calls, inputs, rank),
        CommOp::Reduce { root, .. } if root == rank => reduced(call, calls, inputs, 0),
        CommOp::AllGather => gathered(0),
        CommOp::AllToAll => gathered(rank),
        CommOp::Broadcast { root } if root != rank => vec![(0, part(root as usize, 0).to_vec())],
        CommOp::Broadcast { .. }
        | CommOp::Reduce { .. }
        | CommOp::Send { .. }
        | CommOp::Recv { .. }
        | CommOp::Barrier => Vec::new(),
    }
}

/// At most `len` bytes from `at` on.
fn window(bytes: &[u8], at: usize, len: usize) -> &[u8] {
    &bytes[at.min(bytes.len())..(at + len).min(bytes.len())]
}

/// The part `index` of the reduction of all ranks.
fn reduced(call: &CommCall, calls: &[CommCall], inputs: &[Vec<u8>], index: u32) -> Output {
    let (size, unit) = (calls.len() as u64, call.element.bytes());
    let from = u64::from(index) * call.count;
    let mut out = Vec::with_capacity((call.count * unit) as usize);
    for (owner, theirs) in (0..).zip(calls) {
        // Each rank owns a part of the result, which has its reduction.
        let own = owner * call.count / size..(owner + 1) * call.count / size;
        let reduction = theirs.reduction().or(call.reduction()).unwrap_or(Reduction::Sum);
        let (at, len) = ((from + own.start) * unit, (own.end - own.start) * unit);
        let parts: Vec<&[u8]> =
            inputs.iter().map(|input| window(input, at as usize, len as usize)).collect();
        reduce(call.element, reduction, &parts, len as usize, &mut out);
    }
    vec![(0, out)]
}

/// Appends the reduction of `parts`, which has `len` bytes, in the order of the parts. A part that
/// is shorter gives nothing to the elements that it lacks.
pub(crate) fn reduce(
    element: Element,
    reduction: Reduction,
    parts: &[&[u8]],
    len: usize,
    out: &mut Vec<u8>,
) {
    match element {
        Element::U8 => fold::<u8>(reduction, parts, len, out),
        Element::I8 => fold::<i8>(reduction, parts, len, out),
        Element::U16 => fold::<u16>(reduction, parts, len, out),
        Element::I16 => fold::<i16>(reduction, parts, len, out),
        Element::U32 => fold::<u32>(reduction, parts, len, out),
        Element::I32 => fold::<i32>(reduction, parts, len, out),
        Element::U64 => fold::<u64>(reduction, parts, len, out),
        Element::I64 => fold::<i64>(reduction, parts, len, out),
        Element::F16 => fold::<f16>(reduction, parts, len, out),
        Element::Bf16 => fold::<bf16>(reduction, parts, len, out),
        Element::F32 => fold::<f32>(reduction, parts, len, out),
        Element::F64 => fold::<f64>(reduction, parts, len, out),
    }
}

fn fold<T: Number>(reduction: Reduction, parts: &[&[u8]], len: usize, out: &mut Vec<u8>) {
    let unit = size_of::<T>();
    let combine = match reduction {
        Reduction::Sum | Reduction::Average => T::add,
        Reduction::Product => T::multiply,
        Reduction::Least => T::least,
        Reduction::Largest => T::largest,
    };
    for at in (0..len).step_by(unit) {
        let values = parts.iter().filter_map(|p| p.get(at..at + unit)).map(T::read);
        let all = values.reduce(combine);
        // Each element has its rank's own value, at least.
        let all = all.unwrap_or_else(|| T::read(&[0; 8][..unit]));
        T::write(
            if reduction == Reduction::Average { T::divide(all, parts.len()) } else { all },
            out,
        );
    }
}

/// A number that ranks reduce, in a type that is wide enough for what lies between.
trait Number {
    type Wide: Copy;
    fn read(bytes: &[u8]) -> Self::Wide;
    fn write(value: Self::Wide, to: &mut Vec<u8>);
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn multiply(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn least(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn largest(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn divide(a: Self::Wide, by: usize) -> Self::Wide;
}

macro_rules! integers {
    ($($t:ty)*) => {$(
        impl Number for $t {
            type Wide = $t;
            fn read(bytes: &[u8]) -> $t {
                bytemuck::pod_read_unaligned(bytes)
            }
            fn write(value: $t, to: &mut Vec<u8>) {
                to.extend_from_slice(&value.to_ne_bytes());
            }
            fn add(a: $t, b: $t) -> $t {
                a.wrapping_add(b)
            }
            fn multiply(a: $t, b: $t) -> $t {
                a.wrapping_mul(b)
            }
            fn least(a: $t, b: $t) -> $t {
                a.min(b)
            }
            fn largest(a: $t, b: $t) -> $t {
                a.max(b)
            }
            fn divide(a: $t, by: usize) -> $t {
                // A quotient is no larger than the value, which the type holds.
                (i128::from(a) / by as i128) as $t
            }
        }
    )*};
}

macro_rules! floats {
    ($($t:ty, $wide:ty, $into:path, $from:path;)*) => {$(
        impl Number for $t {
            type Wide = $wide;
            fn read(bytes: &[u8]) -> $wide {
                $into(bytemuck::pod_read_unaligned::<$t>(bytes))
            }
            fn write(value: $wide, to: &mut Vec<u8>) {
                to.extend_from_slice(&$from(value).to_ne_bytes());
            }
            fn add(a: $wide, b: $wide) -> $wide {
                a + b
            }
            fn multiply(a: $wide, b: $wide) -> $wide {
                a * b
            }
            // Of equal ones the first: +0 and -0 are equal.
            fn least(a: $wide, b: $wide) -> $wide {
                if b < a || a.is_nan() { b } else { a }
            }
            fn largest(a: $wide, b: $wide) -> $wide {
                if b > a || a.is_nan() { b } else { a }
            }
            fn divide(a: $wide, by: usize) -> $wide {
                a / by as $wide
            }
        }
    )*};
}

integers!(u8 i8 u16 i16 u32 i32 u64 i64);
floats! {
    f16, f32, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::to_f32, bf16::from_f32;
    f32, f32, f32::from, f32::from;
    f64, f64, f64::from, f64::from;
}
