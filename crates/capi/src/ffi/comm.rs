//! Communicators: calls that all ranks make together, in stream order.

use super::convert::{answer, check_out, give, list, options, text};
use super::operand::room;
use super::operand::{LEASEHOLD_READ, LEASEHOLD_READ_WRITE, LEASEHOLD_WRITE, LeaseholdOperand};
use super::point::LeaseholdPoint;
use super::world::limit_of_ranks;
use crate::extend;
use crate::kinds::{COMMS, HeldBuffer, RUNTIMES, STREAMS, WORLDS};
use crate::objects::Used;
use crate::status::{ffi_guard, ffi_guard_release, of_failure};
use half::{bf16, f16};
use leasehold::{BufferView, Error, Result};
use leasehold_collective::{Check, CommConfig, Element, Group, Reduce};
use std::ffi::{c_char, c_int};

/// Calls are compared one by one, before each is submitted. For debugging.
pub const LEASEHOLD_COMM_CHECK_EACH: u32 = 1;
/// The communicator has an order of its own on its device.
pub const LEASEHOLD_COMM_CONCURRENT: u32 = 2;
/// The ranks send nothing to each other.
pub const LEASEHOLD_COMM_NO_SENDS: u32 = 4;
/// A rank that takes no part in a split.
pub const LEASEHOLD_NO_COLOR: u32 = u32::MAX;

/// Every rank gets the reduction of all ranks' elements.
pub const LEASEHOLD_ALL_REDUCE: u32 = 1;
/// Every rank gets all ranks' elements.
pub const LEASEHOLD_ALL_GATHER: u32 = 2;
/// Every rank gets its part of the reduction of all ranks' elements.
pub const LEASEHOLD_REDUCE_SCATTER: u32 = 3;
/// Every rank gets the root's elements.
pub const LEASEHOLD_BROADCAST: u32 = 4;
/// The root gets the reduction of all ranks' elements.
pub const LEASEHOLD_REDUCE: u32 = 5;
/// Every rank gets one part of each rank's elements.
pub const LEASEHOLD_ALL_TO_ALL: u32 = 6;
/// Elements for another rank, which receives them.
pub const LEASEHOLD_SEND: u32 = 7;
/// Elements of another rank, which sends them.
pub const LEASEHOLD_RECV: u32 = 8;
/// Nothing but the order: every rank waits for all.
pub const LEASEHOLD_BARRIER: u32 = 9;

/// Signed, 8 bits.
pub const LEASEHOLD_I8: u32 = 1;
/// Unsigned, 8 bits.
pub const LEASEHOLD_U8: u32 = 2;
/// Signed, 16 bits.
pub const LEASEHOLD_I16: u32 = 3;
/// Unsigned, 16 bits.
pub const LEASEHOLD_U16: u32 = 4;
/// Signed, 32 bits.
pub const LEASEHOLD_I32: u32 = 5;
/// Unsigned, 32 bits.
pub const LEASEHOLD_U32: u32 = 6;
/// Signed, 64 bits.
pub const LEASEHOLD_I64: u32 = 7;
/// Unsigned, 64 bits.
pub const LEASEHOLD_U64: u32 = 8;
/// IEEE half precision.
pub const LEASEHOLD_F16: u32 = 9;
/// The upper half of a single-precision number.
pub const LEASEHOLD_BF16: u32 = 10;
/// Single precision.
pub const LEASEHOLD_F32: u32 = 11;
/// Double precision.
pub const LEASEHOLD_F64: u32 = 12;

/// The sum.
pub const LEASEHOLD_SUM: u32 = 1;
/// The product.
pub const LEASEHOLD_PRODUCT: u32 = 2;
/// The least.
pub const LEASEHOLD_LEAST: u32 = 3;
/// The largest.
pub const LEASEHOLD_LARGEST: u32 = 4;
/// The sum, divided by the number of ranks.
pub const LEASEHOLD_AVERAGE: u32 = 5;

/// The description of a communicator.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdCommDesc {
    /// `sizeof` this struct.
    pub size: usize,
    /// The name in messages; null for `comm`.
    pub name: *const c_char,
    /// The longest wait for other ranks, in nanoseconds; 0 for five minutes.
    pub timeout_ns: u64,
    /// `LEASEHOLD_COMM_*`.
    pub flags: u32,
    /// 0.
    pub reserved: u32,
}

/// A rank of a communicator.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdCommInfo {
    /// `sizeof` this struct.
    pub size: usize,
    /// This rank, counted from 0.
    pub rank: u32,
    /// The number of ranks.
    pub ranks: u32,
    /// The library and its version.
    pub library: [c_char; 64],
}

/// One call of all ranks.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdCollective {
    /// `LEASEHOLD_ALL_REDUCE` and so on.
    pub call: u32,
    /// The elements: `LEASEHOLD_F32` and so on.
    pub element: u32,
    /// `LEASEHOLD_SUM` and so on, for a call that reduces; else 0.
    pub reduce: u32,
    /// The root, or the other rank of a send or a receive; else 0.
    pub rank: u32,
    /// The memory that is written.
    pub to: LeaseholdOperand,
    /// The memory that is read.
    pub from: LeaseholdOperand,
}

/// Makes a communicator of all ranks of a world.
///
/// # Safety
/// - `desc` is null, or a struct that begins with its size; its name is null or a C string; `comm`
///   can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_comm_create(
    world: u64,
    runtime: u64,
    desc: *const LeaseholdCommDesc,
    comm: *mut u64,
) -> c_int {
    ffi_guard(|| {
        check_out(comm, "the communicator's place")?;
        let (world, open) = (WORLDS.get(world)?, RUNTIMES.get(runtime)?);
        let default = LeaseholdCommDesc {
            size: 0,
            name: std::ptr::null(),
            timeout_ns: 0,
            flags: 0,
            reserved: 0,
        };
        // SAFETY: the caller vouches for the struct.
        let desc = unsafe { options(desc, default, "the description")? };
        // SAFETY: the caller vouches for the name.
        let config = unsafe { desc.config()? };
        // Ranks that are threads do not share a stream.
        let runtime = open.runtime.create_stream()?.runtime();
        let config = match extend::collectives(&runtime)? {
            Some(ops) => config.ops(ops),
            None => config,
        };
        let made = COMMS.add(world.comm(&runtime, &config)?)?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(comm, made, "the communicator's place") }
    })
}

impl LeaseholdCommDesc {
    /// # Safety
    /// - The name is null or a C string.
    unsafe fn config(&self) -> Result<CommConfig> {
        let known = LEASEHOLD_COMM_CHECK_EACH | LEASEHOLD_COMM_CONCURRENT | LEASEHOLD_COMM_NO_SENDS;
        if self.flags & !known != 0 || self.reserved != 0 {
            return Err(Error::invalid(format!(
                "{:#x}: unknown flags of a communicator",
                self.flags
            )));
        }
        let name = match self.name.is_null() {
            true => "comm",
            // SAFETY: by the contract.
            false => unsafe { text(self.name, "the communicator's name")? },
        };
        let has = |flag: u32| self.flags & flag != 0;
        let mut config = CommConfig::new(name)
            .concurrent(has(LEASEHOLD_COMM_CONCURRENT))
            .sends(!has(LEASEHOLD_COMM_NO_SENDS));
        if has(LEASEHOLD_COMM_CHECK_EACH) {
            config = config.check(Check::Each);
        }
        if self.timeout_ns != 0 {
            config = config.timeout(limit_of_ranks(self.timeout_ns));
        }
        Ok(config)
    }
}

/// Adds a holder of a communicator.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_comm_retain(comm: u64) -> c_int {
    ffi_guard(|| COMMS.retain(comm))
}

/// Lets go of a communicator.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_comm_release(comm: u64) -> c_int {
    ffi_guard_release(|| COMMS.release(comm))
}

/// Describes a rank of a communicator.
///
/// # Safety
/// - `info` is a struct that begins with its size and can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_comm_describe(comm: u64, info: *mut LeaseholdCommInfo) -> c_int {
    ffi_guard(|| {
        let comm = COMMS.get(comm)?;
        let mut library = [0; 64];
        let name = comm.library().bytes().take(63);
        // The last byte stays 0.
        library.iter_mut().zip(name).for_each(|(to, byte)| *to = byte as c_char);
        let (rank, ranks) = (comm.rank(), comm.size());
        let found = LeaseholdCommInfo { size: 0, rank, ranks, library };
        // SAFETY: the caller vouches for the struct.
        unsafe { answer(info, &found, "info") }
    })
}

/// The failure of a communicator.
///
/// # Safety
/// - `status` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_comm_failure(comm: u64, status: *mut c_int) -> c_int {
    ffi_guard(|| {
        check_out(status, "the place of the answer")?;
        let found = of_failure(COMMS.get(comm)?.failure());
        // SAFETY: the caller says that it can be written.
        unsafe { give(status, found, "the place of the answer") }
    })
}

/// Makes communicators of parts.
///
/// # Safety
/// - `part` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_comm_split(
    comm: u64,
    color: u32,
    key: i32,
    part: *mut u64,
) -> c_int {
    ffi_guard(|| {
        check_out(part, "the communicator's place")?;
        let color = (color != LEASEHOLD_NO_COLOR).then_some(color);
        let made = COMMS.get(comm)?.split(color, key)?;
        let made = made.map_or(Ok(0), |part| COMMS.add(part))?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(part, made, "the communicator's place") }
    })
}

/// Makes a communicator without some ranks.
///
/// # Safety
/// - `lost` is null, or points to `count` ranks; `rest` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_comm_shrink(
    comm: u64,
    lost: *const u32,
    count: usize,
    rest: *mut u64,
) -> c_int {
    ffi_guard(|| {
        check_out(rest, "the communicator's place")?;
        // SAFETY: the caller vouches for the list.
        let lost = unsafe { list(lost, count, "the lost ranks")? };
        let made = COMMS.add(COMMS.get(comm)?.shrink(lost)?)?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(rest, made, "the communicator's place") }
    })
}

/// Ends a communicator on all ranks.
///
/// # Safety
/// - `why` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_comm_abort(comm: u64, why: *const c_char) -> c_int {
    ffi_guard(|| {
        let comm = COMMS.get(comm)?;
        // SAFETY: the caller vouches for the C string.
        comm.abort(Error::other(unsafe { text(why, "the cause")? }))
    })
}

/// Makes calls together with the other ranks.
///
/// # Safety
/// - `calls` is null, or points to `count` calls; `point` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_comm_call(
    comm: u64,
    stream: u64,
    calls: *const LeaseholdCollective,
    count: usize,
    point: *mut LeaseholdPoint,
) -> c_int {
    ffi_guard(|| {
        let (comm, held) = (COMMS.get(comm)?, STREAMS.get(stream)?);
        // SAFETY: the caller vouches for the list.
        let calls = unsafe { list(calls, count, "calls")? };
        let mut memory = room(count)?;
        for call in calls {
            memory.push(call.memory()?);
        }
        comm.group(held.stream(), |group| {
            std::iter::zip(calls, &memory).try_for_each(|(call, memory)| call.add(group, memory))
        })?;
        // SAFETY: by the contract.
        unsafe { LeaseholdPoint::give(point, held.stream()) };
        Ok(())
    })
}

/// The buffers of a call, of which it may have none.
struct Memory {
    to: Option<Used<HeldBuffer>>,
    from: Option<Used<HeldBuffer>>,
}

/// Whether a call has a field.
#[derive(Clone, Copy, PartialEq)]
enum Has {
    Always,
    Never,
    /// As the caller likes.
    Perhaps,
}

/// The fields of a call.
struct Fields {
    name: &'static str,
    to: Has,
    from: Has,
    reduce: Has,
    rank: Has,
}

impl LeaseholdCollective {
    /// The call's name in messages, and its fields.
    fn fields(&self) -> Result<Fields> {
        use Has::{Always, Never, Perhaps};
        let of = |name, to, from, reduce, rank| Ok(Fields { name, to, from, reduce, rank });
        match self.call {
            LEASEHOLD_ALL_REDUCE => of("an all_reduce", Always, Perhaps, Always, Never),
            LEASEHOLD_ALL_GATHER => of("an all_gather", Always, Always, Never, Never),
            LEASEHOLD_REDUCE_SCATTER => of("a reduce_scatter", Always, Always, Always, Never),
            LEASEHOLD_BROADCAST => of("a broadcast", Always, Never, Never, Always),
            LEASEHOLD_REDUCE => of("a reduce", Always, Never, Always, Always),
            LEASEHOLD_ALL_TO_ALL => of("an all_to_all", Always, Always, Never, Never),
            LEASEHOLD_SEND => of("a send", Never, Always, Never, Always),
            LEASEHOLD_RECV => of("a receive", Always, Never, Never, Always),
            LEASEHOLD_BARRIER => of("a barrier", Never, Never, Never, Never),
            other => Err(Error::invalid(format!(
                "{other} is no call of ranks: LEASEHOLD_ALL_REDUCE to LEASEHOLD_BARRIER"
            ))),
        }
    }

    /// Finds the buffers.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown call or buffer, for a part that is missing, and for a field
    /// that the call does not have.
    fn memory(&self) -> Result<Memory> {
        let Fields { name, to, from, reduce, rank } = self.fields()?;
        let held = |part: &LeaseholdOperand, field: &str, has: Has| match (part.buffer, has) {
            (0, Has::Always) => {
                Err(Error::invalid(format!("{name} needs {field}, and its buffer is 0")))
            }
            (0, _) => Ok(None),
            (_, Has::Never) => {
                Err(Error::invalid(format!("{name} has no {field}: leave its buffer 0")))
            }
            _ => part.held().map(Some),
        };
        for (field, number, has) in [("reduction", self.reduce, reduce), ("rank", self.rank, rank)]
        {
            if number != 0 && has == Has::Never {
                return Err(Error::invalid(format!(
                    "{name} has no {field}, and its field is {number}: leave it 0"
                )));
            }
        }
        Ok(Memory { to: held(&self.to, "to", to)?, from: held(&self.from, "from", from)? })
    }

    fn reduction(&self) -> Result<Reduce> {
        match self.reduce {
            LEASEHOLD_SUM => Ok(Reduce::Sum),
            LEASEHOLD_PRODUCT => Ok(Reduce::Product),
            LEASEHOLD_LEAST => Ok(Reduce::Least),
            LEASEHOLD_LARGEST => Ok(Reduce::Largest),
            LEASEHOLD_AVERAGE => Ok(Reduce::Average),
            other => Err(Error::invalid(format!(
                "{other} is no reduction: LEASEHOLD_SUM to LEASEHOLD_AVERAGE"
            ))),
        }
    }

    /// Adds the call to a group.
    fn add<'a>(&self, group: &mut Group<'a>, memory: &'a Memory) -> Result<()> {
        match self.element {
            LEASEHOLD_I8 => self.add_typed::<i8>(group, memory),
            LEASEHOLD_U8 => self.add_typed::<u8>(group, memory),
            LEASEHOLD_I16 => self.add_typed::<i16>(group, memory),
            LEASEHOLD_U16 => self.add_typed::<u16>(group, memory),
            LEASEHOLD_I32 => self.add_typed::<i32>(group, memory),
            LEASEHOLD_U32 => self.add_typed::<u32>(group, memory),
            LEASEHOLD_I64 => self.add_typed::<i64>(group, memory),
            LEASEHOLD_U64 => self.add_typed::<u64>(group, memory),
            LEASEHOLD_F16 => self.add_typed::<f16>(group, memory),
            LEASEHOLD_BF16 => self.add_typed::<bf16>(group, memory),
            LEASEHOLD_F32 => self.add_typed::<f32>(group, memory),
            LEASEHOLD_F64 => self.add_typed::<f64>(group, memory),
            _ if self.call == LEASEHOLD_BARRIER => group.barrier(),
            other => Err(Error::invalid(format!(
                "{other} is no type of elements: LEASEHOLD_I8 to LEASEHOLD_F64"
            ))),
        }
    }

    fn add_typed<'a, T: Element>(&self, group: &mut Group<'a>, memory: &'a Memory) -> Result<()> {
        let in_place = memory.from.is_none() && self.call != LEASEHOLD_RECV;
        let to_access = if in_place { LEASEHOLD_READ_WRITE } else { LEASEHOLD_WRITE };
        let part = |operand: &LeaseholdOperand, held: &'a Option<Used<HeldBuffer>>, access: u32| {
            let held = held.as_ref().ok_or_else(|| Error::state("a call without its memory"))?;
            BufferView::values::<T>(operand.only(held, access)?)
        };
        let to = || part(&self.to, &memory.to, to_access);
        let from = || part(&self.from, &memory.from, LEASEHOLD_READ);
        match self.call {
            LEASEHOLD_ALL_REDUCE if in_place => group.all_reduce(to()?, self.reduction()?),
            LEASEHOLD_ALL_REDUCE => group.all_reduce_into(to()?, from()?, self.reduction()?),
            LEASEHOLD_ALL_GATHER => group.all_gather(to()?, from()?),
            LEASEHOLD_REDUCE_SCATTER => group.reduce_scatter(to()?, from()?, self.reduction()?),
            LEASEHOLD_BROADCAST => group.broadcast(to()?, self.rank),
            LEASEHOLD_REDUCE => group.reduce(to()?, self.reduction()?, self.rank),
            LEASEHOLD_ALL_TO_ALL => group.all_to_all(to()?, from()?),
            LEASEHOLD_SEND => group.send(from()?, self.rank),
            LEASEHOLD_RECV => group.recv(to()?, self.rank),
            _ => group.barrier(),
        }
    }
}
