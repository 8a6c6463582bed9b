//! The vendor's result codes with their names, and the errors that they become.
//!
//! The real and the simulated driver both use [`error`], so a code has the same meaning above
//! both. So does a driver of one's own.
//!
//! This module must not call the driver.

use cudarc::driver::sys;
use leasehold_core::{Error, ForkGuard, OutOfMemory, Result};
use std::sync::Arc;

/// Defines result codes and their names in the driver's header, and checks that cudarc's bindings
/// give them the same numbers.
macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal $text:ident;)*) => {
        /// Result codes of the driver.
        pub mod code {
            $($(#[$doc])* pub const $name: i32 = $value;)*
        }

        $(const _: () = assert!(code::$name == sys::CUresult::$text as i32);)*

        /// The name of a code in the driver's header, if this crate knows the code.
        #[must_use]
        pub fn name(code: i32) -> Option<&'static str> {
            match code {
                0 => Some("CUDA_SUCCESS"),
                $($value => Some(stringify!($text)),)*
                _ => None,
            }
        }
    };
}

codes! {
    /// An argument is invalid in every state.
    INVALID_VALUE = 1 CUDA_ERROR_INVALID_VALUE;
    /// Not enough memory.
    OUT_OF_MEMORY = 2 CUDA_ERROR_OUT_OF_MEMORY;
    /// `cuInit` was not called.
    NOT_INITIALIZED = 3 CUDA_ERROR_NOT_INITIALIZED;
    /// The driver is being torn down.
    DEINITIALIZED = 4 CUDA_ERROR_DEINITIALIZED;
    /// The toolkit's stub library was loaded instead of the driver.
    STUB_LIBRARY = 34 CUDA_ERROR_STUB_LIBRARY;
    /// No device.
    NO_DEVICE = 100 CUDA_ERROR_NO_DEVICE;
    /// No device has this ordinal.
    INVALID_DEVICE = 101 CUDA_ERROR_INVALID_DEVICE;
    /// The image of a module is invalid.
    INVALID_IMAGE = 200 CUDA_ERROR_INVALID_IMAGE;
    /// No context is current, or the context is invalid.
    INVALID_CONTEXT = 201 CUDA_ERROR_INVALID_CONTEXT;
    /// Mapping failed.
    MAP_FAILED = 205 CUDA_ERROR_MAP_FAILED;
    /// The range is mapped already.
    ALREADY_MAPPED = 208 CUDA_ERROR_ALREADY_MAPPED;
    /// No code for this device.
    NO_BINARY_FOR_GPU = 209 CUDA_ERROR_NO_BINARY_FOR_GPU;
    /// The range is not mapped.
    NOT_MAPPED = 211 CUDA_ERROR_NOT_MAPPED;
    /// An uncorrectable memory error.
    ECC_UNCORRECTABLE = 214 CUDA_ERROR_ECC_UNCORRECTABLE;
    /// The two devices are not peers.
    PEER_ACCESS_UNSUPPORTED = 217 CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    /// PTX that does not compile.
    INVALID_PTX = 218 CUDA_ERROR_INVALID_PTX;
    /// An uncorrectable error of a link between devices.
    NVLINK_UNCORRECTABLE = 220 CUDA_ERROR_NVLINK_UNCORRECTABLE;
    /// The driver's PTX compiler is not installed.
    JIT_COMPILER_NOT_FOUND = 221 CUDA_ERROR_JIT_COMPILER_NOT_FOUND;
    /// PTX newer than the driver.
    UNSUPPORTED_PTX_VERSION = 222 CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
    /// The driver's PTX compiler is disabled.
    JIT_COMPILATION_DISABLED = 223 CUDA_ERROR_JIT_COMPILATION_DISABLED;
    /// The device contained a fault.
    CONTAINED = 226 CUDA_ERROR_CONTAINED;
    /// Source that does not compile.
    INVALID_SOURCE = 300 CUDA_ERROR_INVALID_SOURCE;
    /// A call of the operating system failed.
    OPERATING_SYSTEM = 304 CUDA_ERROR_OPERATING_SYSTEM;
    /// The handle is invalid, or belongs to another context.
    INVALID_HANDLE = 400 CUDA_ERROR_INVALID_HANDLE;
    /// The resource is not in a valid state for this call.
    ILLEGAL_STATE = 401 CUDA_ERROR_ILLEGAL_STATE;
    /// The name was not found.
    NOT_FOUND = 500 CUDA_ERROR_NOT_FOUND;
    /// The work is not over yet.
    NOT_READY = 600 CUDA_ERROR_NOT_READY;
    /// A kernel accessed an address that is not mapped.
    ILLEGAL_ADDRESS = 700 CUDA_ERROR_ILLEGAL_ADDRESS;
    /// A launch needs more resources than the device has.
    LAUNCH_OUT_OF_RESOURCES = 701 CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    /// A kernel ran too long.
    LAUNCH_TIMEOUT = 702 CUDA_ERROR_LAUNCH_TIMEOUT;
    /// Peer access is enabled already.
    PEER_ACCESS_ALREADY_ENABLED = 704 CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    /// Peer access is not enabled.
    PEER_ACCESS_NOT_ENABLED = 705 CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    /// The context was destroyed.
    CONTEXT_IS_DESTROYED = 709 CUDA_ERROR_CONTEXT_IS_DESTROYED;
    /// A kernel's assertion failed.
    ASSERT = 710 CUDA_ERROR_ASSERT;
    /// Memory is registered already.
    HOST_MEMORY_ALREADY_REGISTERED = 712 CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    /// Memory is not registered.
    HOST_MEMORY_NOT_REGISTERED = 713 CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    /// A kernel corrupted its call stack.
    HARDWARE_STACK_ERROR = 714 CUDA_ERROR_HARDWARE_STACK_ERROR;
    /// A kernel ran an illegal instruction (a trap).
    ILLEGAL_INSTRUCTION = 715 CUDA_ERROR_ILLEGAL_INSTRUCTION;
    /// A kernel used a misaligned address.
    MISALIGNED_ADDRESS = 716 CUDA_ERROR_MISALIGNED_ADDRESS;
    /// A kernel used an address of another address space.
    INVALID_ADDRESS_SPACE = 717 CUDA_ERROR_INVALID_ADDRESS_SPACE;
    /// A kernel's program counter is invalid.
    INVALID_PC = 718 CUDA_ERROR_INVALID_PC;
    /// A kernel failed for another reason.
    LAUNCH_FAILED = 719 CUDA_ERROR_LAUNCH_FAILED;
    /// The blocks of a cooperative launch do not all run at a time.
    COOPERATIVE_LAUNCH_TOO_LARGE = 720 CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    /// Not permitted.
    NOT_PERMITTED = 800 CUDA_ERROR_NOT_PERMITTED;
    /// Not supported.
    NOT_SUPPORTED = 801 CUDA_ERROR_NOT_SUPPORTED;
    /// The system is not ready: a service of the machine is not running.
    SYSTEM_NOT_READY = 802 CUDA_ERROR_SYSTEM_NOT_READY;
    /// The kernel module and the driver's library have different versions.
    SYSTEM_DRIVER_MISMATCH = 803 CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    /// Forward compatibility is not supported on this device.
    COMPAT_NOT_SUPPORTED_ON_DEVICE = 804 CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE;
    /// The multi-process service cannot be reached.
    MPS_CONNECTION_FAILED = 805 CUDA_ERROR_MPS_CONNECTION_FAILED;
    /// The multi-process service failed.
    MPS_RPC_FAILURE = 806 CUDA_ERROR_MPS_RPC_FAILURE;
    /// The multi-process service ended this client.
    MPS_CLIENT_TERMINATED = 810 CUDA_ERROR_MPS_CLIENT_TERMINATED;
    /// The call is not allowed while a stream is captured.
    STREAM_CAPTURE_UNSUPPORTED = 900 CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    /// An earlier error broke the capture.
    STREAM_CAPTURE_INVALIDATED = 901 CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    /// Two captures would merge.
    STREAM_CAPTURE_MERGE = 902 CUDA_ERROR_STREAM_CAPTURE_MERGE;
    /// The capture did not begin on this stream.
    STREAM_CAPTURE_UNMATCHED = 903 CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    /// A fork of the capture was not joined.
    STREAM_CAPTURE_UNJOINED = 904 CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    /// A dependency would cross the boundary of the capture.
    STREAM_CAPTURE_ISOLATION = 905 CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    /// A dependency on the legacy stream.
    STREAM_CAPTURE_IMPLICIT = 906 CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    /// The event was last recorded in a capture.
    CAPTURED_EVENT = 907 CUDA_ERROR_CAPTURED_EVENT;
    /// Another thread began the capture.
    STREAM_CAPTURE_WRONG_THREAD = 908 CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    /// The executable graph cannot take this update.
    GRAPH_EXEC_UPDATE_FAILURE = 910 CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    /// A launch cannot have such clusters.
    INVALID_CLUSTER_SIZE = 912 CUDA_ERROR_INVALID_CLUSTER_SIZE;
    /// The cause is unknown.
    UNKNOWN = 999 CUDA_ERROR_UNKNOWN;
}

/// Whether the context is lost after this code. For these codes the driver's manual says: "leaves
/// the process in an inconsistent state".
#[must_use]
pub fn is_sticky(code: i32) -> bool {
    matches!(
        code,
        code::ECC_UNCORRECTABLE
            | code::NVLINK_UNCORRECTABLE
            | code::CONTAINED
            | code::ILLEGAL_ADDRESS
            | code::LAUNCH_TIMEOUT
            | code::ASSERT
            | code::HARDWARE_STACK_ERROR
            | code::ILLEGAL_INSTRUCTION
            | code::MISALIGNED_ADDRESS
            | code::INVALID_ADDRESS_SPACE
            | code::INVALID_PC
            | code::LAUNCH_FAILED
            | code::MPS_RPC_FAILURE
            | code::MPS_CLIENT_TERMINATED
    )
}

/// Whether a module's image caused the error, so that the driver's log belongs to the error.
#[must_use]
pub fn is_compile(code: i32) -> bool {
    matches!(
        code,
        code::INVALID_IMAGE
            | code::NO_BINARY_FOR_GPU
            | code::INVALID_PTX
            | code::JIT_COMPILER_NOT_FOUND
            | code::UNSUPPORTED_PTX_VERSION
            | code::JIT_COMPILATION_DISABLED
            | code::INVALID_SOURCE
    )
}

/// Whether the code means that an update of an executable graph was refused, not that it was wrong.
/// The driver returns 1 if the operands' kind or shape may not change. It returns 801 if the node
/// cannot be updated, and 910 if the node's function may not change.
#[must_use]
pub fn is_refused_update(code: i32) -> bool {
    matches!(code, code::INVALID_VALUE | code::NOT_SUPPORTED | code::GRAPH_EXEC_UPDATE_FAILURE)
}

/// The name of a code, or its number.
#[must_use]
pub fn name_or_number(code: i32) -> Box<str> {
    name(code).map_or_else(|| format!("CUDA_ERROR_{code}").into(), Into::into)
}

/// A driver function's name without the suffix for its version.
#[must_use]
pub fn api_name(symbol: &'static str) -> &'static str {
    match symbol.rsplit_once("_v") {
        Some((name, version)) if version.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => symbol,
    }
}

/// The text for the first cause of a lost context.
#[must_use]
pub fn cause(api: &'static str, code: i32, name: &str) -> Arc<str> {
    format!("{} reported {name} ({code}); everything in its context is lost", api_name(api)).into()
}

/// The error for a code that is neither success nor sticky. `requested` is the requested size in
/// bytes, or 0.
#[cold]
#[must_use]
pub fn error(api: &'static str, code: i32, name: Box<str>, requested: u64) -> Error {
    let api = api_name(api);
    if code == code::OUT_OF_MEMORY {
        return OutOfMemory::new(api, requested).note("the driver has no room").into();
    }
    Error::Driver { api, code, name }
}

/// The error for a failure of `cuInit`: `Unavailable`, with a hint for the user.
#[cold]
#[must_use]
pub fn unavailable(code: i32, name: &str) -> Error {
    let hint = match code {
        code::NO_DEVICE => {
            "the driver sees no device; is one installed, and is CUDA_VISIBLE_DEVICES right?"
        }
        code::STUB_LIBRARY => "the toolkit's stub library was loaded instead of the driver's",
        code::SYSTEM_NOT_READY => {
            "the system is not ready; on machines with NVSwitch the fabric manager must run"
        }
        code::SYSTEM_DRIVER_MISMATCH => {
            "the kernel module and the driver's library are of different versions; reboot"
        }
        code::COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "forward compatibility is not supported on this device"
        }
        code::NOT_PERMITTED | code::OPERATING_SYSTEM => {
            "the device files cannot be opened; look at their permissions"
        }
        code::MPS_CONNECTION_FAILED | code::MPS_RPC_FAILURE => {
            "the multi-process service does not answer"
        }
        code::UNKNOWN => {
            "the driver does not say why; often the kernel module is missing or the device files cannot be opened"
        }
        _ => "the driver does not start",
    };
    Error::Unavailable(format!("CUDA: cuInit failed with {name} ({code}): {hint}").into())
}

/// Checks that this process is not a fork of the one that started CUDA. CUDA's state does not
/// survive a fork: calls in a child hang or corrupt the parent's work.
///
/// # Errors
/// `InvalidState` in a fork of the process that started CUDA, with both process numbers.
#[inline]
pub fn check_process(started: ForkGuard) -> Result<()> {
    started.check(|started| {
        format!(
            "CUDA was started in process {} and this is its fork {}: a forked child cannot use CUDA; start it in the child instead, or make \
             children by spawning a program",
            started.process(),
            std::process::id()
        )
        .into()
    })
}

/// The error of every call before [`init`](super::ops::DeviceOps::init).
#[cold]
#[must_use]
pub fn not_started() -> Error {
    Error::state("CUDA is not started: call `init` first")
}

#[cfg(test)]
#[path = "../../tests/unit/codes.rs"]
mod tests;
