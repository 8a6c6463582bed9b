//! The definition of a CPU kernel: a function over one tile of a grid, with its operands and
//! parameters.
//!
//! A kernel's grid is a function of its parameters alone, and one tile computes each output element
//! completely, in one order. So a result is bit-identical for any number of threads, and for eager
//! and replayed execution. A kernel allocates nothing; its scratch memory is on the stack (at most
//! [`STACK_BYTES`]).
//!
//! [`KernelSpec::plan`] refuses meaningless parameters and returns the requirements of a launch.
//! [`KernelSpec::check_bound`] refuses operands that do not meet them. The library makes both the
//! check of each kernel, which the runtime calls before every launch. So a tile itself checks only
//! values from device memory (positions, token ids).
//!
//! This module must not know any particular kernel, nor the runtime above the traits.

use std::borrow::Cow;
use std::marker::PhantomData;

use bytemuck::Pod;
use leasehold::kernel::{Access, Binding, CpuArgs, CpuFn, LaunchInfo};

use super::elem::DType;
use super::isa::Isa;
#[cfg(target_arch = "aarch64")]
use super::simd::Neon;
#[cfg(target_arch = "x86_64")]
use super::simd::{Amx, Avx2, Avx512, Avx512Bf16};
use super::simd::{Generic, Simd, Task};

/// The maximum number of operands of a kernel.
pub const MAX_OPERANDS: usize = 12;
/// The maximum stack of a tile, in bytes; a worker's stack must have it.
pub const STACK_BYTES: usize = 160 << 10;

/// An operand in a kernel's signature.
#[derive(Debug, Clone, Copy)]
pub struct Operand {
    /// The name in error messages.
    pub name: &'static str,
    /// The kernel's access to the operand.
    pub access: Access,
}

/// An operand that is read.
pub(crate) const fn read(name: &'static str) -> Operand {
    Operand { name, access: Access::Read }
}

/// An operand that is written.
pub(crate) const fn write(name: &'static str) -> Operand {
    Operand { name, access: Access::Write }
}

/// An operand that is read and written.
pub(crate) const fn update(name: &'static str) -> Operand {
    Operand { name, access: Access::ReadWrite }
}

/// The address of operand `i` as a pointer.
#[inline(always)]
pub(crate) fn ptr<T>(args: &CpuArgs<'_>, i: usize) -> *mut T {
    std::ptr::with_exposed_provenance_mut(args.bindings()[i].addr as usize)
}

/// An empty binding, for operands that the parameters leave out.
pub const NONE: Binding = Binding { addr: 0, len: 0, native: 0, access: Access::Read };

/// The memory of a slice as a binding, for launches without a runtime ([`KernelSpec::run`]). The
/// binding borrows nothing.
#[must_use]
pub fn bind<T>(slice: &mut [T]) -> Binding {
    let addr = slice.as_mut_ptr().expose_provenance() as u64;
    Binding { addr, len: size_of_val(slice) as u64, native: 0, access: Access::ReadWrite }
}

/// Like [`bind`], for the memory of a slice that is only read.
#[must_use]
pub fn bind_read<T>(slice: &[T]) -> Binding {
    let addr = slice.as_ptr().expose_provenance() as u64;
    Binding { addr, len: size_of_val(slice) as u64, native: 0, access: Access::Read }
}

/// The reason why a launch is refused.
pub type Refusal = Cow<'static, str>;

/// The size of an operand: elements, and bytes of one.
pub(crate) type Extent = (usize, usize);

/// The requirements of a launch with given parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Tiles in x, y and z.
    pub grid: [u32; 3],
    /// The minimum number of bytes of each operand, in the order of the signature. 0 for an operand
    /// that these parameters leave out, which is bound as an empty range.
    pub bytes: [u64; MAX_OPERANDS],
    /// The alignment of each operand, in the same order; 0 and 1 require nothing.
    pub align: [u8; MAX_OPERANDS],
    /// A bit for each operand that may be the same memory as the last one: then an element is read
    /// and written at one place.
    pub in_place: u16,
    /// A bit for each operand that must have these bytes and no more.
    pub exact: u16,
}

impl Launch {
    /// A launch of `grid` tiles, with the elements and bytes of each operand.
    pub(crate) fn new(grid: [usize; 3], operands: &[Extent]) -> Result<Self, Refusal> {
        let mut launch = Self {
            grid: [0; 3],
            bytes: [0; MAX_OPERANDS],
            align: [1; MAX_OPERANDS],
            in_place: 0,
            exact: 0,
        };
        for (to, from) in launch.grid.iter_mut().zip(grid) {
            *to = u32::try_from(from).map_err(|_| Refusal::from("more than 2^32 tiles"))?;
        }
        for (i, &(count, bytes)) in operands.iter().enumerate() {
            launch.bytes[i] = (count as u64)
                .checked_mul(bytes as u64)
                .ok_or("an operand of more than 2^64 bytes")?;
            launch.align[i] = bytes as u8;
        }
        Ok(launch)
    }

    /// Asks for no more bytes of operand `i` than the launch needs, if `so`.
    pub(crate) fn exactly(mut self, i: usize, so: bool) -> Self {
        self.exact |= u16::from(so) << i;
        self
    }

    /// Allows operand `i` to be the last one, if `alike` says that both have the same layout.
    pub(crate) fn or_in_place(mut self, i: usize, alike: bool) -> Self {
        self.in_place |= u16::from(alike) << i;
        self
    }
}

/// `a · b` elements.
pub(crate) fn times(a: usize, b: usize) -> Result<usize, Refusal> {
    a.checked_mul(b).ok_or_else(|| "an operand of more than 2^64 elements".into())
}

/// Parameters of a kernel: plain words, which kernels in other languages must declare in the same
/// way.
pub trait Params: Pod {
    /// The type's name.
    const NAME: &'static str;
    /// The fields in order, each as its declaration: `n: [u32; 3]`. Kernels in other languages
    /// declare the same.
    const FIELDS: &'static [&'static str];

    /// The bytes that a launch carries.
    fn as_bytes(&self) -> &[u8] {
        bytemuck::bytes_of(self)
    }

    /// The parameters in `bytes`; `None` for another number of bytes.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytemuck::try_pod_read_unaligned(bytes).ok()
    }
}

/// Declares a structure of 32-bit words.
macro_rules! params {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$fmeta:meta])* pub $field:ident: $ty:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Default, bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(C)]
        pub struct $name { $($(#[$fmeta])* pub $field: $ty,)* }
        impl $crate::kernels::cpu::tile::Params for $name {
            const NAME: &'static str = stringify!($name);
            const FIELDS: &'static [&'static str] = &[$(concat!(stringify!($field), ": ", stringify!($ty))),*];
        }
    };
}
pub(crate) use params;

/// A kernel's source.
pub trait Kernel: 'static {
    /// The name in registries.
    const NAME: &'static str;
    /// Its signature.
    const OPERANDS: &'static [Operand];
    /// Its parameters.
    type Params: Params;
    /// Says whether the last operand may be one of the others, if [`Launch::in_place`] allows it.
    const IN_PLACE: bool = false;

    /// Says whether the kernel multiplies matrices. Only such a kernel is compiled for a level that
    /// adds instructions for products; any other one is the kernel of the level below.
    const PRODUCT: bool = false;

    /// Checks the parameters and returns the requirements of a launch.
    ///
    /// # Errors
    /// The reason, if the parameters describe no computation of this kernel.
    fn plan(p: &Self::Params) -> Result<Launch, Refusal>;

    /// Computes a tile. `#[inline(always)]`, like all functions that it calls.
    ///
    /// # Safety
    /// - `plan(p)` is `Ok`, and `t` is a tile of its grid.
    /// - The operands have the bytes and the alignment that the plan requires, and are accessible
    ///   as the signature says.
    /// - An operand that is written overlaps no other one, except as `plan(p)` allows. No other
    ///   code writes what the tile reads, or accesses what the tile writes.
    unsafe fn tile<S: Simd>(s: S, p: &Self::Params, t: &CpuArgs<'_>);
}

/// The registry entry of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct KernelSpec {
    /// The name.
    pub name: &'static str,
    /// The signature.
    pub operands: &'static [Operand],
    /// Bytes of the parameters.
    pub params_bytes: usize,
    /// Says whether the last operand may be one of the others.
    pub in_place: bool,
    /// The levels for which the binary contains the kernel, the most specific first.
    pub variants: &'static [(Isa, CpuFn)],
    fields: &'static [&'static str],
    plan: fn(&[u8]) -> Result<Launch, Refusal>,
}

impl KernelSpec {
    /// The entry of kernel `K`.
    #[must_use]
    pub const fn of<K: Kernel>() -> Self {
        assert!(K::OPERANDS.len() <= MAX_OPERANDS && size_of::<K::Params>() <= 4096);
        Self {
            name: K::NAME,
            operands: K::OPERANDS,
            params_bytes: size_of::<K::Params>(),
            in_place: K::IN_PLACE,
            variants: Variants::<K>::ALL,
            fields: K::Params::FIELDS,
            plan: plan::<K>,
        }
    }

    /// The operand that may be memory that grows in parts, and the one with the parts' limits.
    #[must_use]
    pub fn limited(&self) -> Option<(u32, u32)> {
        let at = |name| self.operands.iter().position(|o| o.name == name);
        at("key cache").zip(at("limits")).map(|(cache, limits)| (cache as u32, limits as u32))
    }

    /// The requirements of a launch with these parameters.
    ///
    /// # Errors
    /// The reason, if the size or the contents of the parameters are wrong.
    pub fn plan(&self, params: &[u8]) -> Result<Launch, Refusal> {
        (self.plan)(params)
    }

    /// The sizes among parameters, for people: those of rows, columns, heads and positions. Several
    /// of one name, as the outputs of one product, are joined; zeros among them are left out.
    #[must_use]
    pub fn shape(&self, params: &[u8]) -> String {
        const SIZES: [&str; 9] =
            ["m", "rows", "k", "n", "heads", "kv_heads", "head_dim", "positions", "vocabulary"];
        let (mut words, _) = params.as_chunks::<4>();
        let mut shape: Vec<String> = Vec::new();
        for (name, of) in self.fields.iter().filter_map(|field| field.split_once(": ")) {
            let count = of.split_once("; ").and_then(|(_, n)| n.strip_suffix(']')?.parse().ok());
            let Some((values, rest)) = words.split_at_checked(count.unwrap_or(1)) else { break };
            words = rest;
            if SIZES.contains(&name) {
                let values = values.iter().map(|word| u32::from_ne_bytes(*word));
                let all: Vec<_> = values.filter(|&n| n > 0).map(|n| n.to_string()).collect();
                shape.push(format!("{name} {}", all.join(" + ")));
            }
        }
        shape.join(", ")
    }

    /// Checks that `bindings` satisfy a launch: their number, sizes, alignment and overlap.
    ///
    /// # Errors
    /// The reason, naming the kernel and the operand.
    pub fn check(&self, launch: &Launch, bindings: &[Binding]) -> Result<(), Refusal> {
        self.check_bound(launch, &LaunchInfo::new((launch.grid, [1; 3], 0), &[], bindings))
    }

    /// Like [`check`](Self::check), for the bindings of a launch.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn check_bound(&self, launch: &Launch, bound: &LaunchInfo<'_>) -> Result<(), Refusal> {
        if bound.bindings() != self.operands.len() {
            return Err(self.wrong_count(bound.bindings()));
        }
        let last = self.operands.len() - 1;
        for (i, operand) in self.operands.iter().enumerate() {
            let aligned = launch.bytes[i] == 0 || bound.is_aligned(i, launch.align[i].into());
            let too_long = launch.exact >> i & 1 == 1 && bound.len(i) > launch.bytes[i];
            if bound.len(i) < launch.bytes[i] || !aligned || too_long {
                return Err(self.wrong_operand(
                    operand,
                    launch.bytes[i],
                    launch.align[i],
                    bound.len(i),
                ));
            }
            for (j, other) in self.operands[..i].iter().enumerate() {
                let written = operand.access.writes() || other.access.writes();
                let in_place = i == last && launch.in_place >> j & 1 == 1 && bound.same(i, j);
                if written && bound.overlap(i, j) && !in_place {
                    return Err(self.overlapping(other, operand));
                }
            }
        }
        Ok(())
    }

    /// The variant of level `isa`, or the most specific one for this machine.
    #[must_use]
    pub fn resolve(&self, isa: Option<Isa>) -> Option<(Isa, CpuFn)> {
        self.variants
            .iter()
            .copied()
            .find(|(level, _)| isa.is_none_or(|isa| isa == *level) && level.available())
    }

    /// Runs a whole launch on the calling thread, tile after tile. The result is bit-identical to
    /// any order on any threads. `isa` selects a level.
    ///
    /// # Safety
    /// - The bindings' ranges are valid during the call. Meanwhile no other code uses them in a way
    ///   that the signature excludes.
    ///
    /// # Errors
    /// As [`plan`](Self::plan) and [`check`](Self::check); also if the level is not available.
    pub unsafe fn run(
        &self,
        isa: Option<Isa>,
        params: &[u8],
        bindings: &[Binding],
    ) -> Result<(), Refusal> {
        let launch = self.plan(params)?;
        self.check(&launch, bindings)?;
        let (_, tile) = self.resolve(isa).ok_or("this machine does not run that level")?;
        let [nx, ny, nz] = launch.grid;
        // SAFETY: the caller vouches for the ranges; there is no scratch memory.
        let mut args = unsafe {
            CpuArgs::new((launch.grid, [1; 3]), bindings, params, (std::ptr::null_mut(), 0))
        };
        for z in 0..nz {
            for y in 0..ny {
                for x in 0..nx {
                    args.set_tile([x, y, z]);
                    // SAFETY: parameters, lengths and overlap were checked above, and the caller
                    // vouches for the ranges.
                    unsafe { tile(&args) }
                }
            }
        }
        Ok(())
    }

    #[cold]
    fn wrong_count(&self, found: usize) -> Refusal {
        format!("kernel {} takes {} operands, {found} are bound", self.name, self.operands.len())
            .into()
    }

    #[cold]
    fn wrong_operand(&self, operand: &Operand, bytes: u64, align: u8, bound: u64) -> Refusal {
        format!(
            "operand {} of kernel {} needs {bytes} bytes aligned to {align}; {bound} bytes are bound",
            operand.name, self.name
        )
        .into()
    }

    #[cold]
    fn overlapping(&self, a: &Operand, b: &Operand) -> Refusal {
        format!("operands {} and {} of kernel {} overlap", a.name, b.name, self.name).into()
    }
}

fn plan<K: Kernel>(params: &[u8]) -> Result<Launch, Refusal> {
    let params = K::Params::from_bytes(params).ok_or_else(|| -> Refusal {
        format!(
            "kernel {} takes {} bytes of parameters, not {}",
            K::NAME,
            size_of::<K::Params>(),
            params.len()
        )
        .into()
    })?;
    K::plan(&params).map_err(|why| format!("kernel {}: {why}", K::NAME).into())
}

/// The levels for which kernel `K` is compiled.
struct Variants<K>(PhantomData<K>);

impl<K: Kernel> Variants<K> {
    #[cfg(target_arch = "x86_64")]
    const ALL: &'static [(Isa, CpuFn)] = &[
        (Isa::Amx, if K::PRODUCT { entry::<K, Amx> as CpuFn } else { entry::<K, Avx512> }),
        (
            Isa::Avx512Bf16,
            if K::PRODUCT { entry::<K, Avx512Bf16> as CpuFn } else { entry::<K, Avx512> },
        ),
        (Isa::Avx512, entry::<K, Avx512>),
        (Isa::Avx2, entry::<K, Avx2>),
        (Isa::Generic, entry::<K, Generic>),
    ];
    #[cfg(target_arch = "aarch64")]
    const ALL: &'static [(Isa, CpuFn)] =
        &[(Isa::Neon, entry::<K, Neon>), (Isa::Generic, entry::<K, Generic>)];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    const ALL: &'static [(Isa, CpuFn)] = &[(Isa::Generic, entry::<K, Generic>)];
}

/// One tile of `K`, as work for a level.
struct OneTile<'a, K: Kernel>(&'a CpuArgs<'a>, PhantomData<K>);

impl<K: Kernel> Task for OneTile<'_, K> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // The size is right, because `plan` has read the parameters. With a wrong size the tile
        // does nothing.
        if let Some(params) = K::Params::from_bytes(self.0.params_bytes()) {
            // SAFETY: `entry`'s caller vouches for the launch and the tile.
            unsafe { K::tile(s, &params, self.0) }
        }
    }
}

/// The tile function of kernel `K` at level `S`.
///
/// # Safety
/// - The conditions of [`Kernel::tile`]; the machine supports the level.
unsafe fn entry<K: Kernel, S: Simd>(tile: &CpuArgs<'_>) {
    // SAFETY: the caller vouches for the level.
    let s = unsafe { S::assume() };
    s.run(OneTile::<K>(tile, PhantomData));
}

/// The element type of a parameter word.
///
/// # Errors
/// If the word names no type.
pub(crate) fn dtype(what: &str, raw: u32) -> Result<DType, Refusal> {
    DType::from_raw(raw).ok_or_else(|| format!("{raw} is no element type of {what}").into())
}

/// The element type of a word that `plan` has accepted.
#[inline(always)]
pub(crate) fn accepted(raw: u32) -> DType {
    DType::from_raw(raw).unwrap_or(DType::F16)
}

/// Refuses a parameter that must be positive.
pub(crate) fn positive(what: &'static str, value: u32) -> Result<usize, Refusal> {
    if value == 0 { Err(format!("{what} is zero").into()) } else { Ok(value as usize) }
}
