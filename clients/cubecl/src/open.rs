//! The devices: real ones, or simulated ones on request.

use leasehold::{Context, DeviceId, Error, Result, Runtime};
use std::path::Path;

/// The variable that names the first device.
const VARIABLE: &str = "LEASEHOLD_DEVICE";

/// The devices' context, and the number of the first one.
fn first() -> Result<(&'static Context, u16)> {
    let text = std::env::var_os(VARIABLE).unwrap_or_else(|| "cuda:0".into());
    let unknown = || {
        Error::invalid(format!(
            "{VARIABLE}={text:?} is no device of this client; known are cuda:0 and sim-cuda:0"
        ))
    };
    let name = text.to_str().ok_or_else(unknown)?;
    let (simulated, rest) = match name.strip_prefix("sim-") {
        Some(rest) => (true, rest),
        None => (false, name),
    };
    let number = rest.strip_prefix("cuda").ok_or_else(unknown)?;
    let number = match number.strip_prefix(':') {
        Some(number) => number.parse().map_err(|_| unknown())?,
        None if number.is_empty() => 0,
        None => return Err(unknown()),
    };
    let context = if simulated { leasehold_capi_sim::context()? } else { Context::global() };
    Ok((context, number))
}

/// The folder of the CUDA toolkit's headers (`cuda_fp16.h` and others), which CubeCL's kernels
/// include: that of `CUDA_PATH` or `CUDA_HOME`, else the usual one. None on simulated devices,
/// which have headers of their own.
pub(crate) fn headers() -> Option<String> {
    let simulated = std::env::var(VARIABLE).is_ok_and(|name| name.starts_with("sim-"));
    let named = ["CUDA_PATH", "CUDA_HOME"].into_iter().filter_map(|name| std::env::var(name).ok());
    let folders = named.chain(["/usr/local/cuda".to_owned()]);
    let mut folders = folders.map(|folder| format!("{folder}/include"));
    folders.find(|folder| !simulated && Path::new(folder).join("cuda_fp16.h").is_file())
}

/// The runtime of CubeCL's device with an index.
///
/// # Errors
/// `InvalidArgument` for a device that the variable cannot name; as [`Context::runtime`].
pub(crate) fn open(index: u16) -> Result<Runtime> {
    let (context, first) = first()?;
    context.runtime(DeviceId::cuda(u32::from(first) + u32::from(index)))
}

/// The number of devices from the first one on; none where there is no driver.
pub(crate) fn count() -> u16 {
    let Ok((context, first)) = first() else { return 0 };
    let kind = DeviceId::cuda(0).backend;
    let all = context.devices().iter().filter(|info| info.id.backend == kind).count();
    u16::try_from(all).unwrap_or(u16::MAX).saturating_sub(first)
}
