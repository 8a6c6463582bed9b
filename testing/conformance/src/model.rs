//! The results of collectives, by arithmetic on the host. Tests of libraries and of programs
//! compare with it.
//!
//! Libraries sum in different orders, so a sum that rounds on the way has no one result. Such
//! reductions are [`rounded`](Number::rounded) once, or have no [`exact`](Number::exact) result.
//!
//! This module must not know ranks, streams or libraries.

use half::{bf16, f16};
use leasehold_collective::{Element, Reduce};
use std::fmt::Debug;

/// A type of elements that the model computes with.
pub trait Number: Element + PartialEq + Debug {
    /// The number of this type that is nearest to one. An integer type drops digits that it has
    /// not.
    fn of(number: f64) -> Self;

    /// The reduction of numbers, rounded once where the type rounds. Integers wrap. At least one
    /// number.
    fn rounded(how: Reduce, all: &[Self]) -> Self;

    /// The reduction of numbers, if every library computes the same bits: whatever the order, no
    /// sum or product on the way is rounded. Integers have no average. Sums and products are of
    /// numbers that are not negative.
    fn exact(how: Reduce, all: &[Self]) -> Option<Self>;
}

macro_rules! integers {
    ($($rust:ty)*) => {$(
        impl Number for $rust {
            fn of(number: f64) -> Self {
                number as i128 as Self
            }

            fn rounded(how: Reduce, all: &[Self]) -> Self {
                let join = |a: Self, b: Self| match how {
                    Reduce::Sum | Reduce::Average => a.wrapping_add(b),
                    Reduce::Product => a.wrapping_mul(b),
                    Reduce::Least => a.min(b),
                    Reduce::Largest => a.max(b),
                };
                all.iter().copied().reduce(join).unwrap_or_default()
            }

            fn exact(how: Reduce, all: &[Self]) -> Option<Self> {
                (how != Reduce::Average && !all.is_empty()).then(|| Self::rounded(how, all))
            }
        }
    )*};
}
integers!(i8 u8 i16 u16 i32 u32 i64 u64);

macro_rules! floats {
    ($($rust:ty = $digits:literal, $of:expr, $to:expr;)*) => {$(
        impl Number for $rust {
            fn of(number: f64) -> Self {
                $of(number)
            }

            fn rounded(how: Reduce, all: &[Self]) -> Self {
                let numbers = all.iter().copied().map($to);
                $of(match how {
                    Reduce::Sum => numbers.sum(),
                    Reduce::Product => numbers.product(),
                    Reduce::Least => numbers.fold(f64::INFINITY, f64::min),
                    Reduce::Largest => numbers.fold(f64::NEG_INFINITY, f64::max),
                    Reduce::Average => numbers.sum::<f64>() / all.len() as f64,
                })
            }

            fn exact(how: Reduce, all: &[Self]) -> Option<Self> {
                let all: Vec<f64> = all.iter().copied().map($to).collect();
                let held = |x: f64| ($to($of(x)) == x).then_some(x);
                exact(how, &all, $digits, held).map($of)
            }
        }
    )*};
}
floats! {
    f16 = 11, f16::from_f64, f16::to_f64;
    bf16 = 8, bf16::from_f64, bf16::to_f64;
    f32 = 24, |x: f64| x as f32, f64::from;
    f64 = 53, |x: f64| x, |x: f64| x;
}

/// A number that is not negative, as an odd number and a power of two; 1 for zero.
fn parts(x: f64) -> (u64, i32) {
    if x == 0.0 {
        return (1, 0);
    }
    let bits = x.abs().to_bits();
    let mantissa = bits & ((1 << 52) - 1) | 1 << 52;
    let zeros = mantissa.trailing_zeros();
    (mantissa >> zeros, (bits >> 52) as i32 - 1075 + zeros as i32)
}

/// The largest power of two by which the factors of a product differ from 1. The types hold more.
const RANGE: i32 = 12;

/// The reduction of numbers of so many binary digits. `held` gives those that the type holds.
fn exact(how: Reduce, all: &[f64], digits: u32, held: impl Fn(f64) -> Option<f64>) -> Option<f64> {
    let most = 1u128 << digits;
    match how {
        Reduce::Sum | Reduce::Average => {
            let unit = all.iter().filter(|x| **x != 0.0).map(|x| parts(*x).1).min().unwrap_or(0);
            let units = |x: &f64| match parts(*x) {
                _ if *x == 0.0 => Some(0),
                (odd, power) if power - unit < 64 => Some(u128::from(odd) << (power - unit)),
                _ => None,
            };
            let total: u128 = all.iter().map(units).sum::<Option<u128>>()?;
            let (sum, size) = (all.iter().sum(), all.len() as f64);
            if total > most {
                return None;
            }
            if how == Reduce::Sum {
                return held(sum);
            }
            // A library may divide before it adds.
            all.iter().try_for_each(|x| held(x / size).map(drop))?;
            all.len().is_power_of_two().then(|| held(sum / size)).flatten()
        }
        Reduce::Product => {
            let odd = all.iter().try_fold(1u128, |product, x| {
                let product = product * u128::from(parts(*x).0);
                (product <= most).then_some(product)
            });
            let far: i32 = all
                .iter()
                .map(|x| if *x == 0.0 { 0 } else { x.abs().log2().abs().ceil() as i32 })
                .sum();
            odd.filter(|_| far <= RANGE)?;
            held(all.iter().product())
        }
        Reduce::Least => all.iter().copied().reduce(f64::min),
        Reduce::Largest => all.iter().copied().reduce(f64::max),
    }
}

/// Elements of a rank, from the element `from` on: 1, 2 or 3, so that sums and products of a few
/// ranks are exact in every type. They differ by rank and by place.
#[must_use]
pub fn own<T: Number>(rank: u32, from: usize, count: usize) -> Vec<T> {
    let number = |i: usize| {
        let i = i as u32;
        f64::from((rank * (i % 5) + i + i / 7) % 3 + 1)
    };
    (from..from + count).map(|i| T::of(number(i))).collect()
}

/// The reduction of the elements that so many ranks [have](own), rounded once.
#[must_use]
pub fn reduced<T: Number>(size: u32, how: Reduce, from: usize, count: usize) -> Vec<T> {
    let all: Vec<Vec<T>> = (0..size).map(|rank| own(rank, from, count)).collect();
    let column = |i: usize| all.iter().map(|own| own[i]).collect::<Vec<T>>();
    (0..count).map(|i| T::rounded(how, &column(i))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_that_depends_on_the_order_is_none() {
        let of = |how, all: [f64; 4]| f16::exact(how, &all.map(f16::from_f64)).map(f16::to_f64);
        assert_eq!(of(Reduce::Sum, [1.0, 2.0, 3.0, 0.0]), Some(6.0));
        assert_eq!(of(Reduce::Sum, [2048.0, 1.0, 0.0, 0.0]), None, "2049 has 12 digits");
        assert_eq!(of(Reduce::Sum, [2046.0, 2.0, 0.0, 0.0]), Some(2048.0));
        assert_eq!(of(Reduce::Average, [1.0, 2.0, 0.0, 0.0]), Some(0.75));
        assert_eq!(of(Reduce::Product, [3.0, 0.0, 5.0, 0.25]), Some(0.0));
        assert_eq!(of(Reduce::Product, [2047.0, 3.0, 0.0, 1.0]), None, "a product on the way");
        assert_eq!(of(Reduce::Largest, [1.0, 9.0, 2.0, 0.5]), Some(9.0));
        assert_eq!(i32::exact(Reduce::Average, &[1, 3]), None);
        assert_eq!(u8::exact(Reduce::Sum, &[200, 100]), Some(44));
        assert_eq!(u8::exact(Reduce::Sum, &[]), None);
    }

    #[test]
    fn a_rounded_result_is_exact_where_there_is_one() {
        for how in Reduce::ALL {
            for all in [[1.0, 2.0, 4.0, 1.0], [0.5, 8.0, 3.0, 0.0], [2.0; 4]] {
                let (f32s, bf16s) = (all.map(|x| x as f32), all.map(bf16::from_f64));
                assert_eq!(f32::exact(how, &f32s), Some(f32::rounded(how, &f32s)), "{how} {all:?}");
                let (exact, rounded) = (bf16::exact(how, &bf16s), bf16::rounded(how, &bf16s));
                assert!(exact.is_none_or(|exact| exact == rounded), "{how} {all:?}");
            }
        }
        assert_eq!(i8::of(200.0), -56, "digits that it has not");
        let sum: i32 = (0..3).map(|rank| own::<i32>(rank, 4, 1)[0]).sum();
        assert_eq!(reduced::<i32>(3, Reduce::Sum, 4, 1), [sum]);
    }
}
