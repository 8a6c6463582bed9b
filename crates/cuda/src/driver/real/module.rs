//! Modules and functions.
//!
//! This module must not know pipelines.

use super::stream::{attributes, config};
use super::{RealDriver, drive, plausible};
use crate::driver::codes::{self, code};
use crate::driver::ops::{
    FunctionInfo, Launch, ModuleOps, NativeFunction, NativeModule, NativeTensorMap,
};
use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute_enum as Attribute, CUjit_option_enum as Jit, CUmodule,
};
use leasehold_core::{Error, Result};
use leasehold_hal::TensorMap;
use std::borrow::Cow;
use std::ffi::{CString, c_int, c_void};
use std::ptr;

/// Bytes of the driver's log that are kept.
const LOG: usize = 8192;

/// The first bytes of images of machine code: ELF, and NVIDIA's container of several images.
const ELF: &[u8] = b"\x7fELF";
const FAT: &[u8] = &0xBA55_ED50_u32.to_le_bytes();

/// The image in the driver's form: text that ends with a zero.
///
/// # Errors
/// `Compile` for an image that is not text.
fn terminated(image: &[u8]) -> Result<Cow<'_, [u8]>> {
    if image.is_empty() {
        return Err(Error::Compile { log: "the image is empty".into() });
    }
    if image.starts_with(ELF) || image.starts_with(FAT) {
        return Err(Error::Compile { log: "the image is machine code, not PTX".into() });
    }
    if image.last() == Some(&0) {
        return Ok(Cow::Borrowed(image));
    }
    let mut text = Vec::with_capacity(image.len() + 1);
    text.extend_from_slice(image);
    text.push(0);
    Ok(Cow::Owned(text))
}

impl RealDriver {
    fn function_attribute(&self, function: NativeFunction, attribute: Attribute) -> Result<u32> {
        let mut value = 0;
        drive!(self, cuFuncGetAttribute(&raw mut value, attribute, function.0 as CUfunction))?;
        Ok(value.max(0) as u32)
    }

    /// Loads a text that ends with a zero, or machine code.
    ///
    /// # Safety
    /// - `image` is a text that ends with a zero, or a whole cubin of NVIDIA's compiler.
    unsafe fn load_image(&self, image: &[u8]) -> Result<NativeModule> {
        let mut log = vec![0_u8; LOG];
        let mut options = [Jit::CU_JIT_ERROR_LOG_BUFFER, Jit::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        // The driver takes sizes in the place of pointers.
        let mut values =
            [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut::<c_void>(LOG)];
        let mut module: CUmodule = ptr::null_mut();
        let code = self.code(|f| {
            // SAFETY: the image is whole, as the caller vouches. The count is that of the options
            // and values, which live during the call.
            unsafe {
                (f.cuModuleLoadDataEx)(
                    &raw mut module,
                    image.as_ptr().cast(),
                    options.len() as u32,
                    options.as_mut_ptr(),
                    values.as_mut_ptr(),
                )
            }
        })?;
        match code {
            0 => plausible::object("cuModuleLoadDataEx", module).map(NativeModule),
            code if codes::is_compile(code) => {
                let name = self.name(code);
                let log = super::text(&log);
                let log = log.trim_end();
                let log = if log.is_empty() {
                    format!("{name} ({code})")
                } else {
                    format!("{name} ({code}): {log}")
                };
                Err(Error::Compile { log: log.into() })
            }
            code => Err(self.failed("cuModuleLoadDataEx", code, image.len() as u64)),
        }
    }

    /// Offsets and sizes of the parameters, if the driver reports them.
    pub(super) fn parameters(&self, function: NativeFunction) -> Result<Option<Vec<(u32, u32)>>> {
        let mut params = Vec::new();
        loop {
            let (mut offset, mut size) = (0_usize, 0_usize);
            let mut known = true;
            let code = self.code(|f| match f.cuFuncGetParamInfo {
                // SAFETY: the pointers are to locals, and the function is the caller's.
                Some(info) => unsafe {
                    info(function.0 as CUfunction, params.len(), &raw mut offset, &raw mut size)
                },
                None => {
                    known = false;
                    0
                }
            })?;
            match code {
                _ if !known => return Ok(None),
                0 if params.len() == plausible::PARAMETERS => {
                    return Err(plausible::endless("cuFuncGetParamInfo"));
                }
                0 => params.push((offset as u32, size as u32)),
                // The index is past the last parameter.
                code::INVALID_VALUE => return Ok(Some(params)),
                code => return Err(self.failed("cuFuncGetParamInfo", code, 0)),
            }
        }
    }
}

impl ModuleOps for RealDriver {
    fn module_load(&self, image: &[u8]) -> Result<NativeModule> {
        let image = terminated(image)?;
        // SAFETY: the image is a text that ends with a zero.
        unsafe { self.load_image(&image) }
    }

    unsafe fn module_load_cubin(&self, image: &[u8]) -> Result<NativeModule> {
        // SAFETY: the image is a whole cubin, as the caller vouches.
        unsafe { self.load_image(image) }
    }

    unsafe fn module_unload(&self, module: NativeModule) -> Result<()> {
        drive!(self, cuModuleUnload(module.0 as CUmodule))
    }

    unsafe fn module_function(
        &self,
        module: NativeModule,
        name: &str,
        _: &[(u32, u32)],
    ) -> Result<NativeFunction> {
        let missing = || Error::NotFound(format!("the module has no function {name}").into());
        let text = CString::new(name).map_err(|_| missing())?;
        let mut function: CUfunction = ptr::null_mut();
        // SAFETY: the pointer is to a local, the name ends with a zero, and the module is the
        // caller's.
        let code = self.code(|f| unsafe {
            (f.cuModuleGetFunction)(&raw mut function, module.0 as CUmodule, text.as_ptr())
        })?;
        match code {
            0 => {
                plausible::object("cuModuleGetFunction", function)?;
            }
            code::NOT_FOUND => return Err(missing()),
            code => return Err(self.failed("cuModuleGetFunction", code, 0)),
        }
        self.call("cuFuncLoad", 0, |f| match f.cuFuncLoad {
            // SAFETY: the driver just returned this function.
            Some(load) => unsafe { load(function) },
            // Drivers before 12.4 load a function at its first launch.
            None => 0,
        })?;
        Ok(NativeFunction(function as u64))
    }

    unsafe fn function_info(&self, function: NativeFunction) -> Result<FunctionInfo> {
        Ok(FunctionInfo {
            block_threads: self
                .function_attribute(function, Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            registers: self.function_attribute(function, Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            shared: self
                .function_attribute(function, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            local: self
                .function_attribute(function, Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            params: self.parameters(function)?,
            binary: self
                .function_attribute(function, Attribute::CU_FUNC_ATTRIBUTE_BINARY_VERSION)?,
            source: self.function_attribute(function, Attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION)?,
        })
    }

    unsafe fn function_allow_shared(&self, function: NativeFunction, bytes: u32) -> Result<()> {
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        drive!(self, cuFuncSetAttribute(function.0 as CUfunction, attribute, bytes as c_int))
    }

    unsafe fn function_allow_clusters(&self, function: NativeFunction) -> Result<()> {
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        drive!(self, cuFuncSetAttribute(function.0 as CUfunction, attribute, 1))
    }

    unsafe fn occupancy(&self, launch: &Launch<'_>) -> Result<u32> {
        let (function, mut count) = (launch.function.0 as CUfunction, 0);
        if launch.attributes.is_none() {
            let (threads, shared) = (launch.block.iter().product::<u32>(), launch.shared as usize);
            drive!(
                self,
                cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    &raw mut count,
                    function,
                    threads as c_int,
                    shared
                )
            )?;
            return Ok(count.max(0) as u32);
        }
        let mut attributes = attributes(launch);
        let config = config(launch, ptr::null_mut(), &mut attributes);
        self.call("cuOccupancyMaxActiveClusters", 0, |f| match f.cuOccupancyMaxActiveClusters {
            // SAFETY: the function is the caller's, the pointers are to locals.
            Some(clusters) => unsafe { clusters(&raw mut count, function, &raw const config) },
            None => code::NOT_SUPPORTED,
        })?;
        Ok(count.max(0) as u32)
    }

    fn tensor_map(&self, addr: u64, map: &TensorMap) -> Result<NativeTensorMap> {
        let rank = map.rank().min(5);
        let sizes: [u64; 5] = std::array::from_fn(|i| map.size(i));
        let strides: [u64; 4] = std::array::from_fn(|i| map.stride(i + 1));
        let boxes: [u32; 5] = std::array::from_fn(|i| map.box_of(i));
        let steps: [u32; 5] = std::array::from_fn(|i| map.step_of(i));
        let [interleave, swizzle, l2, fill] = map.modes().map(c_int::from);
        let element = map.element().map_or(-1, |element| element as c_int);
        let mut native = NativeTensorMap([0; TensorMap::BYTES as usize]);
        let mut known = true;
        let code = self.code(|f| match f.cuTensorMapEncodeTiled {
            // SAFETY: the pointers are to locals of five elements, and to a map of the driver's
            // size and alignment. The driver keeps the address, and does not use it.
            Some(encode) => unsafe {
                encode(
                    (&raw mut native).cast(),
                    element,
                    rank as u32,
                    ptr::without_provenance_mut(addr as usize),
                    sizes.as_ptr(),
                    strides.as_ptr(),
                    boxes.as_ptr(),
                    steps.as_ptr(),
                    interleave,
                    swizzle,
                    l2,
                    fill,
                )
            },
            None => {
                known = false;
                0
            }
        })?;
        match code {
            _ if !known => Err(Error::Unsupported(
                "the CUDA driver has no tensor maps (before 12.0); install a newer one".into(),
            )),
            0 => Ok(native),
            code => Err(self.failed("cuTensorMapEncodeTiled", code, 0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_ends_with_a_zero_and_code_is_refused() {
        assert_eq!(&*terminated(b".version").unwrap(), b".version\0");
        assert!(matches!(terminated(b".version\0"), Ok(Cow::Borrowed(_))));
        for image in [&b""[..], b"\x7fELF...", &[0x50, 0xED, 0x55, 0xBA, 1]] {
            assert!(matches!(terminated(image), Err(Error::Compile { .. })));
        }
    }
}
