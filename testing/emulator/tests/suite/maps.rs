//! Tensor maps, mbarriers and bulk copies, against a slow model and results of the host.

use crate::cuda::{On, compile_with, operand, read};
use leasehold_emulator::{Emulator, Operand};

const KINDS: &str = include_str!("../maps.cu");

fn compile(text: &str, options: &[&str]) -> Option<Emulator> {
    let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
    compile_with(text, &options).unwrap_or_else(|why| panic!("{why}"))
}

/// A tensor map before it is encoded.
#[derive(Debug, Clone, Copy)]
struct Map {
    device: u64,
    element: u8,
    rank: usize,
    sizes: [u64; 5],
    strides: [u64; 5],
    boxes: [u32; 5],
    steps: [u32; 5],
    swizzle: u8,
    nan: bool,
}

const U8: u8 = 0;
const U32: u8 = 2;
const F32: u8 = 7;

impl Map {
    /// A tensor without gaps.
    fn new(at: u64, element: u8, sizes: &[u64], boxes: &[u32]) -> Self {
        let (rank, steps) = (sizes.len(), [1; 5]);
        let (device, swizzle, nan) = (at, 0, false);
        let mut map = Self {
            device,
            element,
            rank,
            sizes: [1; 5],
            strides: [0; 5],
            boxes: [1; 5],
            steps,
            swizzle,
            nan,
        };
        map.sizes[..rank].copy_from_slice(sizes);
        map.boxes[..rank].copy_from_slice(boxes);
        map.strides[0] = map.bytes() as u64;
        for d in 1..rank {
            map.strides[d] = map.strides[d - 1] * map.sizes[d - 1];
        }
        map
    }

    fn bytes(&self) -> usize {
        [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4][usize::from(self.element)]
    }

    fn count(&self, d: usize) -> usize {
        let step = if d == 0 { 1 } else { self.steps[d] };
        self.boxes[d].div_ceil(step) as usize
    }

    /// The bytes of the simulated driver.
    fn encode(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.sizes.iter().flat_map(|v| v.to_le_bytes()).collect();
        bytes.extend(self.strides[1..].iter().flat_map(|v| v.to_le_bytes()));
        bytes.extend(self.boxes.iter().chain(&self.steps).flat_map(|v| v.to_le_bytes()));
        let rank = self.rank as u8;
        bytes.extend([self.element, rank, 0, self.swizzle, 0, u8::from(self.nan), 0x4d, 0x54]);
        bytes.extend(self.device.to_le_bytes());
        bytes
    }

    /// Calls `f` for each element of a box with its place in shared memory, whose first byte has
    /// the address `from`, and that in the tensor.
    fn each(&self, first: [i32; 5], from: usize, mut f: impl FnMut(usize, Option<usize>)) {
        for n in 0..(0..5).map(|d| self.count(d)).product() {
            let (mut rest, mut inside, mut place) = (n, true, 0);
            for d in 0..5 {
                let step = if d == 0 { 1 } else { i64::from(self.steps[d]) };
                let k = i64::from(first[d]) + (rest % self.count(d)) as i64 * step;
                rest /= self.count(d);
                inside &= k >= 0 && k < self.sizes[d] as i64;
                place += k * self.strides[d] as i64;
            }
            let at = from + n * self.bytes();
            // Bits 4 to 6 change by bits 7 to 9.
            let moved = at ^ ((at >> 7 & [0, 1, 3, 7][usize::from(self.swizzle)]) << 4);
            f(moved, inside.then_some(place as usize));
        }
    }
}

/// The parameters behind two pointers: maps at the next multiple of 64, and other bytes.
fn params(maps: &[Map], others: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 48];
    bytes.extend(maps.iter().flat_map(Map::encode));
    bytes.extend(others);
    bytes
}

/// The kernels' `Where`.
fn place(map: &Map, first: [i32; 5], offset: usize, total: usize) -> Vec<u8> {
    let bytes = (0..5).map(|d| map.count(d)).product::<usize>() * map.bytes();
    let words = [map.rank, offset, bytes, total].map(|v| (v as u32).to_le_bytes());
    [first.map(i32::to_le_bytes).as_flattened(), words.as_flattened()].concat()
}

/// Numbers that are no pattern.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    fn map(&mut self) -> Map {
        let element = self.below(13) as u8;
        let rank = 1 + self.below(5) as usize;
        let mut map = Map::new(0, element, &[1; 5][..rank], &[1; 5][..rank]);
        map.swizzle = self.below(4) as u8;
        map.nan = element >= 6 && self.below(2) == 1;
        let pieces = [4, 2, 4, 8][usize::from(map.swizzle)];
        // Rows as wide as the swizzle.
        let pieces = if map.swizzle == 0 { 1 + self.below(pieces) } else { pieces };
        map.boxes[0] = (pieces * 16) as u32 / map.bytes() as u32;
        map.sizes[0] = 1 + self.below(2 * u64::from(map.boxes[0]));
        let mut end = (map.sizes[0] * map.strides[0]).next_multiple_of(16);
        for d in 1..rank {
            map.sizes[d] = 1 + self.below(5);
            map.boxes[d] = 1 + self.below(4) as u32;
            map.steps[d] = 1 + self.below(3) as u32;
            map.strides[d] = end + 16 * self.below(2);
            end = map.strides[d] * map.sizes[d];
        }
        map
    }
}

#[test]
fn boxes_are_those_of_a_slow_model() {
    let Some(emulator) = compile(KINDS, &[]) else { return };
    let mut numbers = Numbers(7);
    let operand_of = |list: &[u8], device| Operand { device, ..read(list) };
    for round in 0..300 {
        let map = Map { device: 0x7000_0000_0100, ..numbers.map() };
        let device = map.device - 256;
        let reach = |d: usize| (map.sizes[d] - 1) * map.strides[d];
        let extent = (0..5).map(reach).sum::<u64>() as usize + map.bytes();
        let mut tensor: Vec<u8> = (0..256 + extent).map(|_| numbers.below(256) as u8).collect();
        let first: [i32; 5] = std::array::from_fn(|d| {
            let (size, side) = (map.sizes[d] as i64, i64::from(map.boxes[d]));
            let at = numbers.below((size + 2 * side) as u64) as i64 - side;
            if d < map.rank { at as i32 } else { 0 }
        });
        let offset = 128 * numbers.below(9) as usize;
        let total = offset + (0..5).map(|d| map.count(d)).product::<usize>() * map.bytes();
        let total = total.next_multiple_of(128);
        let params = params(&[map], &place(&map, first, offset, total));
        let reverse = round % 2 == 1;

        let mut want = vec![0xee; total];
        map.each(first, offset, |to, from| {
            let value =
                from.map_or_else(|| outside(&map), |f| tensor[256 + f..][..map.bytes()].to_vec());
            want[to..to + map.bytes()].copy_from_slice(&rounded(&map, value));
        });
        let mut out = vec![0; total];
        On(&emulator, "load_box", [1; 3], [40, 1, 1])
            .shared(
                total as u32,
                &[operand(&mut out), operand_of(&tensor, device)],
                &params,
                reverse,
            )
            .unwrap_or_else(|why| panic!("{map:?} {first:?}: {why}"));
        assert!(out == want, "{map:?} {first:?} {offset}");

        let shared: Vec<u8> = (0..total).map(|_| numbers.below(256) as u8).collect();
        let mut want = tensor.clone();
        map.each(first, offset, |from, to| {
            let Some(to) = to else { return };
            want[256 + to..][..map.bytes()].copy_from_slice(&shared[from..from + map.bytes()]);
        });
        let to = Operand { device, ..operand(&mut tensor) };
        On(&emulator, "store_box", [1; 3], [40, 1, 1])
            .shared(total as u32, &[to, read(&shared)], &params, reverse)
            .unwrap_or_else(|why| panic!("{map:?} {first:?}: {why}"));
        assert!(tensor == want, "{map:?} {first:?} {offset}");
    }
}

/// An element out of bounds.
fn outside(map: &Map) -> Vec<u8> {
    let nan = match map.bytes() {
        2 => 0x7fff,
        4 => 0x7fff_ffff,
        _ => u64::MAX >> 1,
    };
    (if map.nan { nan } else { 0 }).to_le_bytes()[..map.bytes()].to_vec()
}

/// What a load makes of `f32` in the kinds that have less bits, or no subnormal numbers.
fn rounded(map: &Map, value: Vec<u8>) -> Vec<u8> {
    if map.element < 10 {
        return value;
    }
    let mut float = f32::from_le_bytes(value.try_into().unwrap());
    if map.element != 11 && float.is_subnormal() {
        float *= 0.0;
    }
    if map.element != 10 && float.is_finite() {
        // A sum with a number of 13 bits more rounds to nearest.
        let bits = float.to_bits();
        let (low, high) = (f32::from_bits(bits & !0x1fff), f32::from_bits((bits | 0x1fff) + 1));
        let away = |to: f32| (f64::from(float) - f64::from(to)).abs();
        let even = low.to_bits() >> 13 & 1 == 0;
        let high_value = if high.is_infinite() {
            2.0_f64.powi(128).copysign(f64::from(high))
        } else {
            f64::from(high)
        };
        let up = (f64::from(float) - high_value).abs();
        float = if away(low) < up || (away(low) == up && even) { low } else { high };
    }
    float.to_le_bytes().to_vec()
}
