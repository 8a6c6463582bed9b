//! Kernels: code of the caller's, and what a launch gives it.

use crate::arguments;
use crate::buffer::Base;
use crate::device::state;
use crate::dtype::{self, DType};
use crate::errors::{Class, invalid, raise};
use crate::memory::Block;
use crate::tensor_map::TensorMapObject;
use leasehold::kernel::{
    CpuCFn, Grid, KernelCheck, KernelDesc, KernelSource, Overlap, Params, TensorMap,
};
use leasehold::{Access, KernelBase};
use leasehold_core::sync::Arc;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList, PyString, PyTuple};
use std::borrow::Cow;

/// A part of the parameters.
enum Part {
    /// A tensor map of a buffer.
    Map(u32),
    Number(DType),
}

/// The arguments that a kernel takes: buffers, then tensor maps, then numbers.
pub(crate) struct Signature {
    name: String,
    access: Vec<Access>,
    /// Each map and number, and where it lies in the parameters.
    numbers: Vec<(Part, usize)>,
    params: usize,
}

/// The arguments of a launch.
pub(crate) struct Arguments {
    pub(crate) blocks: Vec<Arc<Block>>,
    pub(crate) ranges: Vec<(u64, u64)>,
    pub(crate) params: Vec<u8>,
}

/// The items of a list or a tuple.
pub(crate) fn items<'py>(of: &Bound<'py, PyAny>, what: &str) -> PyResult<Vec<Bound<'py, PyAny>>> {
    if let Ok(list) = of.cast::<PyList>() {
        return Ok(list.iter().collect());
    }
    if let Ok(tuple) = of.cast::<PyTuple>() {
        return Ok(tuple.iter().collect());
    }
    let kind = of.get_type().to_string();
    Err(Class::ArgumentType.error(format!("{what} are a list or a tuple, not {kind}")))
}

impl Signature {
    /// The arguments of these kinds. The parameters have the size of C's structure, or end with
    /// the last number where a word follows them (`unpadded`).
    fn new(name: &str, args: &Bound<'_, PyAny>, unpadded: bool) -> PyResult<Self> {
        let (mut access, mut numbers, mut end, mut widest) = (Vec::new(), Vec::new(), 0, 1);
        for arg in items(args, "the kinds of a kernel's arguments")? {
            let word = arg.extract::<String>().unwrap_or_default();
            let buffer = match word.as_str() {
                "read" => Some(Access::Read),
                "write" => Some(Access::Write),
                "read_write" => Some(Access::ReadWrite),
                _ => None,
            };
            if let Some(buffer) = buffer {
                if !numbers.is_empty() {
                    return Err(invalid(format!(
                        "kernel {name}: a buffer behind a number; a kernel takes its buffers first"
                    )));
                }
                access.push(buffer);
                continue;
            }
            if let Some(of) = word.strip_prefix("tensor_map:").and_then(|of| of.parse().ok()) {
                if numbers.iter().any(|(part, _)| matches!(part, Part::Number(_))) {
                    return Err(invalid(format!(
                        "kernel {name}: a tensor map behind a number; a kernel takes its buffers \
                         first, then its maps"
                    )));
                }
                numbers.push((Part::Map(of), end));
                end += TensorMap::BYTES as usize;
                continue;
            }
            let number = dtype::parse(&arg).map_err(|error| {
                arguments::because(
                    arg.py(),
                    invalid(format!(
                        "kernel {name}: {} is no kind of argument; a buffer is \"read\", \"write\" \
                         or \"read_write\", a map of buffer 0 is \"tensor_map:0\", and a number its \
                         type, such as \"float32\"",
                        arg.repr().map_or_else(|_| word, |text| text.to_string())
                    )),
                    error,
                )
            })?;
            let part = number.part();
            let at = usize::next_multiple_of(end, part);
            (end, widest) = (at + number.size as usize, widest.max(part));
            numbers.push((Part::Number(number), at));
        }
        // As a struct of C has it.
        let params = end.next_multiple_of(if unpadded { 4 } else { widest });
        Ok(Self { name: name.to_owned(), access, numbers, params })
    }

    /// The parameters of numbers.
    pub(crate) fn params(&self, numbers: &[Bound<'_, PyAny>]) -> PyResult<Vec<u8>> {
        if numbers.len() != self.numbers.len() {
            return Err(invalid(format!(
                "kernel {} takes {} numbers, not {}",
                self.name,
                self.numbers.len(),
                numbers.len()
            )));
        }
        let mut params = vec![0; self.params];
        for (number, (part, at)) in numbers.iter().zip(&self.numbers) {
            let dtype = match part {
                Part::Number(dtype) => dtype,
                Part::Map(of) => {
                    let map = number.cast::<TensorMapObject>().map_err(|_| {
                        Class::ArgumentType.error(format!(
                            "kernel {} takes a TensorMap of its buffer {of}, not {}",
                            self.name,
                            number.get_type()
                        ))
                    })?;
                    let bytes = Params::bytes(&map.get().0);
                    params[*at..at + bytes.len()].copy_from_slice(bytes);
                    continue;
                }
            };
            let to = &mut params[*at..at + dtype.size as usize];
            if !dtype.pack_plain(number, to) {
                to.copy_from_slice(&dtype.pack(number)?);
            }
        }
        Ok(params)
    }

    /// The buffers and numbers of a launch.
    pub(crate) fn arguments(&self, args: &Bound<'_, PyAny>) -> PyResult<Arguments> {
        let args = items(args, "a launch's arguments")?;
        let count = self.access.len();
        if args.len() != count + self.numbers.len() {
            return Err(invalid(format!(
                "kernel {} takes {count} buffers and {} numbers; {} arguments were given",
                self.name,
                self.numbers.len(),
                args.len()
            )));
        }
        let (mut blocks, mut ranges) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for (i, arg) in args[..count].iter().enumerate() {
            let buffer = arg.cast::<Base>().map_err(|_| {
                Class::ArgumentType.error(format!(
                    "argument {i} of kernel {} is a Buffer, not {}; Device.upload and from_dlpack \
                     make one of an array",
                    self.name,
                    arg.get_type()
                ))
            })?;
            let (block, range) = buffer.get().range()?;
            blocks.push(block);
            ranges.push(range);
        }
        let params = self.params(&args[count..])?;
        Ok(Arguments { blocks, ranges, params })
    }

    /// The tensor maps, each with its buffer and its place.
    fn maps(&self) -> Vec<(u32, u32)> {
        let map = |(part, at): &(Part, usize)| match part {
            Part::Map(of) => Some((*of, *at as u32)),
            Part::Number(_) => None,
        };
        self.numbers.iter().filter_map(map).collect()
    }

    pub(crate) fn access(&self) -> &[Access] {
        &self.access
    }
}

/// A number, or one for each of up to three directions.
pub(crate) fn directions(of: &Bound<'_, PyAny>, what: &str) -> PyResult<[u32; 3]> {
    if let Ok(one) = of.extract::<u32>() {
        return Ok([one, 1, 1]);
    }
    let mut all = [1; 3];
    if let Ok(tuple) = of.cast::<PyTuple>()
        && (1..=3).contains(&tuple.len())
    {
        for (to, item) in all.iter_mut().zip(tuple.iter()) {
            *to = arguments::value(&item, what)?;
        }
        return Ok(all);
    }
    let kind = of.repr().map_or_else(|_| "this".into(), |text| text.to_string());
    Err(invalid(format!("{what} is a number or a tuple of up to three, each below 2**32: {kind}")))
}

/// Code of the caller's that streams launch: CUDA C++, PTX, or a C function on the CPU.
///
/// Nobody can check what the code does. So `trusted=True` is needed: with it the caller vouches
/// that each launch touches its buffers alone, within their bounds, as `args` says, and that blocks
/// of a launch do not write what other blocks use. The runtime checks the rest of each launch: the
/// number and access of the buffers, their alignment and overlap, the device's limits.
///
/// Parameters
/// ----------
/// name
///     The name in reports, and of the function in `cuda` and `ptx` unless `entry` says another.
/// args
///     The kinds of the arguments: `"read"`, `"write"` or `"read_write"` for each buffer, then
///     `"tensor_map:0"` for each `TensorMap`, with the number of its buffer, and then a type such
///     as `"float32"` for each number. A function with maps takes each as a parameter of its own.
/// cuda
///     A text of CUDA C++, which is compiled at the first launch. Its function is
///     `extern "C" __global__` and takes a pointer for each buffer, then the numbers.
/// ptx
///     A text of PTX.
/// cpu
///     A C function for `cpu:0`: an address, or a function of `ctypes`. It takes a
///     `const leasehold_tile *` (`leasehold_runtime.h`), on several threads at a time.
/// options
///     Options for the compiler of `cuda`.
/// entry
///     The name of the function in `cuda` and `ptx`.
/// alignment
///     What the buffers' addresses are multiples of.
/// overlap
///     `"refused"`; `"in_place"`: two buffers may be the same range; `"any"`.
/// cluster
///     The blocks of a cluster, of which each launch is made: a number, or one for each direction.
///     CUDA alone has clusters, from compute capability 9.0 on.
/// cooperative
///     All blocks of a launch run at the same time, so that they may wait for each other. CUDA
///     alone has such launches. A launch of more blocks than `resident_blocks` is refused.
/// dependent_launch
///     The code waits itself for the kernels in front of it in a graph (`griddepcontrol.wait`), so
///     that its blocks may begin while these run.
/// reading_early
///     The buffers that the code may read before it waits. It takes one `unsigned` more, behind its
///     numbers, with a bit for each buffer that a graph lets it read so.
/// trusted
///     Must be `True`.
///
/// Examples
/// --------
/// >>> import leasehold
/// >>> SOURCE = '''
/// ... extern "C" __global__ void scale(float* x, float a) {
/// ...     x[blockIdx.x * blockDim.x + threadIdx.x] *= a;
/// ... }'''
/// >>> scale = leasehold.Kernel("scale", ["read_write", "float32"], cuda=SOURCE, trusted=True)
/// >>> scale
/// Kernel('scale', ['read_write', 'float32'])
#[pyclass(frozen, weakref, name = "Kernel", module = "leasehold")]
pub(crate) struct KernelObject {
    pub(crate) base: KernelBase,
    pub(crate) signature: Arc<Signature>,
}

/// The address of a C function, and the object that keeps it.
fn function(of: &Bound<'_, PyAny>) -> PyResult<CpuCFn> {
    let py = of.py();
    let address = match of.extract::<usize>() {
        Ok(address) => address,
        Err(_) => {
            let ctypes = py.import("ctypes")?;
            if !of.is_instance(&ctypes.getattr("_CFuncPtr")?)? {
                let text = "cpu is the address of a C function, or a function of ctypes";
                return Err(Class::ArgumentType.error(text));
            }
            let cast = ctypes.call_method1("cast", (of, ctypes.getattr("c_void_p")?))?;
            cast.getattr("value")?.extract::<Option<usize>>()?.unwrap_or(0)
        }
    };
    if address == 0 {
        return Err(invalid("the C function's address is 0"));
    }
    // SAFETY: the caller vouches with `trusted` that a function of this kind lies there.
    Ok(unsafe { std::mem::transmute::<usize, CpuCFn>(address) })
}

fn text(of: &Bound<'_, PyAny>, what: &str) -> PyResult<String> {
    arguments::value(of, what)
}

#[pymethods]
impl KernelObject {
    #[new]
    #[pyo3(
        signature = (name, args, *, cuda=None, ptx=None, cpu=None, options=None, entry=None, alignment=None, overlap=None, cluster=None, cooperative=None, dependent_launch=None, reading_early=None, trusted=None),
        text_signature = "(name, args, *, cuda=None, ptx=None, cpu=None, options=(), entry=None, alignment=1, overlap='refused', cluster=1, cooperative=False, dependent_launch=False, reading_early=(), trusted=False)"
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn new(
        name: &Bound<'_, PyAny>,
        args: &Bound<'_, PyAny>,
        cuda: Option<&Bound<'_, PyAny>>,
        ptx: Option<&Bound<'_, PyAny>>,
        cpu: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyAny>>,
        entry: Option<&Bound<'_, PyAny>>,
        alignment: Option<&Bound<'_, PyAny>>,
        overlap: Option<&Bound<'_, PyAny>>,
        cluster: Option<&Bound<'_, PyAny>>,
        cooperative: Option<&Bound<'_, PyAny>>,
        dependent_launch: Option<&Bound<'_, PyAny>>,
        reading_early: Option<&Bound<'_, PyAny>>,
        trusted: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let name = text(name, "a kernel's name is a text")?;
        let trusts =
            trusted.is_some_and(|trusted| trusted.cast::<PyBool>().is_ok_and(|t| t.is_true()));
        let early: Vec<u32> = reading_early.map_or(Ok(Vec::new()), |early| {
            arguments::list(early, "buffers that are read early have numbers", (30, "buffers"))
        })?;
        let cluster = cluster.map_or(Ok([1; 3]), |cluster| directions(cluster, "a cluster"))?;
        let flag = |of: Option<&Bound<'_, PyAny>>, what: &str| {
            of.map_or(Ok(false), |of| arguments::value::<bool>(of, what))
        };
        let cooperative = flag(cooperative, "cooperative is a bool")?;
        let dependent_launch = flag(dependent_launch, "dependent_launch is a bool")?;
        let signature = Signature::new(&name, args, !early.is_empty())?;
        let entry = entry.map_or(Ok(name.clone()), |entry| text(entry, "an entry is a text"))?;
        let mut sources = Vec::new();
        if let Some(source) = cuda {
            let source = text(source, "cuda is a text of CUDA C++")?;
            let options = match options {
                Some(options) => items(options, "the compiler's options")?
                    .iter()
                    .map(|option| text(option, "an option is a text"))
                    .collect::<PyResult<Vec<_>>>()?,
                None => Vec::new(),
            };
            sources.push(KernelSource::CudaC { source: source.into(), options: options.into() });
        }
        if let Some(source) = ptx {
            sources.push(KernelSource::Ptx(text(source, "ptx is a text of PTX")?.into()));
        }
        if let Some(address) = cpu {
            sources.push(KernelSource::CpuC(function(address)?));
        }
        if sources.is_empty() {
            return Err(invalid(format!("kernel {name} has no code; give cuda, ptx or cpu")));
        }
        if !trusts {
            return Err(invalid(format!(
                "the code of kernel {name} can reach any memory of the process, and nobody checks \
                 it; if you vouch for it, say so with trusted=True"
            )));
        }
        let overlap: Option<String> = arguments::optional(overlap, "overlap is a name")?;
        let overlap = match overlap.as_deref() {
            None | Some("refused") => Overlap::Refused,
            Some("in_place") => Overlap::InPlace,
            Some("any") => Overlap::Any,
            Some(other) => {
                return Err(invalid(format!(
                    "{other:?} is no rule of overlaps; known are refused, in_place, any"
                )));
            }
        };
        let alignment: Option<u32> =
            arguments::optional(alignment, "an alignment is a number of bytes")?;
        // The function of a CPU goes with its object.
        let keeper = cpu.map(|function| function.clone().unbind());
        let check = KernelCheck::new(move |_| {
            let _ = &keeper;
            Ok(())
        });
        let desc = |source| {
            let desc = KernelDesc::new(name.clone(), source, &signature.access, check.clone());
            let desc = desc.entry(entry.clone()).aligned(alignment.unwrap_or(1));
            let mut desc = desc.overlapping(overlap).cluster(cluster).reading_early(&early);
            (desc.cooperative, desc.dependent_launch) = (cooperative, dependent_launch);
            (desc.params, desc.maps) = (signature.params as u32, signature.maps().into());
            desc
        };
        let descs = sources.into_iter().map(desc).collect();
        // SAFETY: the caller vouches for the code with `trusted`.
        let base = unsafe { KernelBase::with_sources(descs) }.map_err(raise)?;
        Ok(Self { base, signature: Arc::new(signature) })
    }

    /// The name in reports.
    #[getter]
    fn name(&self) -> &str {
        &self.signature.name
    }

    /// The kinds of the arguments.
    #[getter]
    fn args<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.kinds())
    }

    /// Compiles the kernel for a device beforehand; else its first launch does.
    ///
    /// Raises `CompileError` with the compiler's text, and `UnsupportedError` if the device takes
    /// none of the sources.
    fn prepare(&self, device: &Bound<'_, PyAny>) -> PyResult<()> {
        let state = state(device)?;
        let prepare = || {
            state.use_streams()?;
            self.base.prepare(&state.runtime)
        };
        device.py().detach(prepare).map_err(raise)
    }

    /// The blocks of the kernel that a device runs at the same time while nothing else runs, each
    /// with so many threads and bytes of shared memory. A cooperative launch has no more.
    ///
    /// Raises what `prepare` does, and `UnsupportedError` on other devices than CUDA's.
    #[pyo3(
        signature = (device, *, block=None, shared_bytes=None),
        text_signature = "($self, device, *, block=1, shared_bytes=0)"
    )]
    fn resident_blocks(
        &self,
        device: &Bound<'_, PyAny>,
        block: Option<&Bound<'_, PyAny>>,
        shared_bytes: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let threads = block.map_or(Ok([1; 3]), |block| directions(block, "a block"))?;
        let shared = arguments::optional(shared_bytes, "shared_bytes is a number of bytes")?;
        let threads = threads.iter().fold(1, |n: u32, &of| n.saturating_mul(of));
        let state = state(device)?;
        let count = || {
            state.use_streams()?;
            self.base.resident_blocks(&state.runtime, threads, shared.unwrap_or(0))
        };
        device.py().detach(count).map_err(raise)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let name = PyString::new(py, self.name()).repr()?;
        Ok(format!("Kernel({name}, {})", PyList::new(py, self.kinds())?.repr()?))
    }
}

impl KernelObject {
    fn kinds(&self) -> Vec<Cow<'static, str>> {
        let buffer = |access: &Access| match access {
            Access::Read => "read".into(),
            Access::Write => "write".into(),
            Access::ReadWrite => "read_write".into(),
        };
        let signature = &self.signature;
        let numbers = signature.numbers.iter().map(|(part, _)| match part {
            Part::Map(of) => format!("tensor_map:{of}").into(),
            Part::Number(dtype) => dtype.name.into(),
        });
        signature.access.iter().map(buffer).chain(numbers).collect()
    }
}

/// The grid of a launch.
pub(crate) fn grid(
    grid: &Bound<'_, PyAny>,
    block: Option<&Bound<'_, PyAny>>,
    shared_bytes: Option<&Bound<'_, PyAny>>,
) -> PyResult<Grid> {
    let blocks = directions(grid, "a grid")?;
    let threads = block.map_or(Ok([1; 3]), |block| directions(block, "a block"))?;
    let shared = arguments::optional(shared_bytes, "shared_bytes is a number of bytes")?;
    Ok(Grid::new(blocks).threads(threads).shared(shared.unwrap_or(0)))
}
