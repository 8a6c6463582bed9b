//! Parts for a crate that adds functions to the C ABI, as `leasehold-capi-sim` does.
//!
//! This module must not know who adds them.

pub use crate::status::ffi_guard;
use leasehold::{Context, Error, Result, Runtime};
use leasehold_collective::driver::CollectiveOps;
use leasehold_core::sync::{Arc, OnceLock};
use std::ffi::c_char;

static SIMULATED: OnceLock<fn() -> Result<&'static Context>> = OnceLock::new();

/// Sets where devices whose names begin with `sim-` come from. The first call counts.
pub fn simulate(context: fn() -> Result<&'static Context>) {
    SIMULATED.get_or_init(|| context);
}

/// The context of the simulated devices.
pub(crate) fn simulated() -> Result<&'static Context> {
    let Some(context) = SIMULATED.get() else {
        return Err(Error::Unavailable(
            "this library has no simulated devices: libleasehold_capi_sim has them".into(),
        ));
    };
    context()
}

type Collectives = fn(&Runtime) -> Result<Option<Arc<dyn CollectiveOps>>>;

static COLLECTIVES: OnceLock<Collectives> = OnceLock::new();

/// Sets which library of collectives a runtime's device has, if it is not its own. The first call
/// counts.
pub fn simulate_collectives(of: Collectives) {
    COLLECTIVES.get_or_init(|| of);
}

/// The library of collectives of a simulated device.
pub(crate) fn collectives(runtime: &Runtime) -> Result<Option<Arc<dyn CollectiveOps>>> {
    COLLECTIVES.get().map_or(Ok(None), |of| of(runtime))
}

/// The runtime of an open device.
///
/// # Errors
/// `InvalidArgument` for a handle that names no open device.
pub fn runtime(device: u64) -> Result<Runtime> {
    Ok(crate::device::DEVICES.get(device)?.runtime.clone())
}

/// A text for the caller, freed by [`leasehold_text_free`](crate::ffi::leasehold_text_free).
///
/// # Errors
/// `InvalidState` for a text with a zero byte.
pub fn owned(text: String) -> Result<*mut c_char> {
    crate::ffi::convert::owned(text)
}
