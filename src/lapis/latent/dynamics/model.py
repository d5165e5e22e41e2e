"""EM for linear dynamics: expected squares of residuals, and the matrices that make them smallest.

Sums are of residuals about the matrices of the E-step, r_t = x_t - A x_{t-1} and e_t = y_t - C x_t, rather than of raw
products: variances are not differences of large numbers. Entries of y that are missing beside observed ones count as
latent, with their expectation and covariance given x_t and the observed entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lapis.errors import OptionError
from lapis.latent.driver import Expected, LatentModel
from lapis.latent.dynamics.kalman import NAMES, Filtered, Series, System, kalman_filter, smoother
from lapis.latent.floor import raised

Sums = Mapping[str, Tensor]


@dataclass(frozen=True)
class DynamicsModel(LatentModel):
    """Which matrices are held, and which covariances are diagonal."""

    system: System
    fixed: frozenset[str]
    diagonal: frozenset[str]
    """Of "Q" and "R"."""
    least: Mapping[str, Tensor] = field(default_factory=dict)
    """Smallest variances of Q, R and P: what is told exactly has a density still (`lapis.latent.floor`)."""

    def expectation(self, data: Series) -> Expected:
        filtered = kalman_filter(self.system, data)
        means, factors = smoother(filtered, data)
        sums = {"A": self.system.A, "C": self.system.C, "m": self.system.m}
        if not {"m", "P"} <= self.fixed:
            sums.update(self._initial_sums(means[0], factors[0]))
        if not {"A", "Q"} <= self.fixed:
            sums.update(self._transition_sums(means, factors, filtered, data))
        if not {"C", "R"} <= self.fixed:
            sums.update(self._observation_sums(means, factors, data))
        unknown = Expected(sums, means.new_zeros(()), float(data.seen.sum()))
        # H(q) = log p(y) - E_q[log p(y, x)], as q is p(x | y)
        return replace(unknown, entropy=filtered.log_likelihoods.sum() - self.log_joint(unknown))

    def _initial_sums(self, mean: Tensor, factor: Tensor) -> dict[str, Tensor]:
        gap = mean - self.system.m
        spread = (factor @ factor.mT).sum(0) * (len(mean) / len(factor))
        return {"sequences": mean.new_tensor(len(mean)), "first": gap.sum(0), "first2": gap.mT @ gap + spread}

    def _transition_sums(self, means: Tensor, factors: Tensor, filtered: Filtered, data: Series) -> dict[str, Tensor]:
        a = self.system.A
        if len(means) == 1:
            nothing = torch.zeros_like(a)
            return {"steps": nothing[0, 0], "rr": nothing, "rx": nothing, "xx": nothing}
        valid = (~data.ended[:, 1:]).mT.to(means)
        gains = torch.stack(filtered.gains[:-1])
        # x_{t-1} given x_t is J x_t + noise, so r_t = (I - A J) x_t - A noise
        onward = (torch.eye(len(a), dtype=a.dtype, device=a.device) - a @ gains) @ factors[1:]
        back = [a @ part for part in filtered.backward[:-1]]
        width = max(part.shape[2] for part in back)
        noise = torch.stack([torch.nn.functional.pad(part, (0, width - part.shape[2])) for part in back])
        behind = torch.stack(
            [torch.nn.functional.pad(part, (0, width - part.shape[2])) for part in filtered.backward[:-1]]
        )
        residual = means[1:] - means[:-1] @ a.mT
        weighted, before = residual * valid[..., None], means[:-1]
        return {
            "steps": valid.sum(),
            "rr": torch.einsum("tbi,tbj->ij", weighted, residual)
            + _sum_of(onward @ onward.mT, valid)
            + _sum_of(noise @ noise.mT, valid),
            "rx": torch.einsum("tbi,tbj->ij", weighted, before)
            + _sum_of(onward @ (gains @ factors[1:]).mT, valid)
            - _sum_of(noise @ behind.mT, valid),
            "xx": torch.einsum("tbi,tbj->ij", before * valid[..., None], before)
            + _sum_of(factors[:-1] @ factors[:-1].mT, valid),
        }

    def _observation_sums(self, means: Tensor, factors: Tensor, data: Series) -> dict[str, Tensor]:
        c, r = self.system.C, self.system.R
        seen = data.seen.transpose(0, 1)
        gaps = torch.where(seen, data.y.transpose(0, 1).nan_to_num() - means @ c.mT, 0.0)
        n, ee = c.new_zeros(()), torch.zeros_like(r)
        ez, zz = torch.zeros_like(c), c.new_zeros(c.shape[1], c.shape[1])
        for pattern in torch.unique(seen.flatten(0, 1), dim=0):
            if not bool(pattern.any()):
                continue
            mine = (seen == pattern).all(-1)
            spread = _sum_of(factors @ factors.mT, mine.to(means))
            fill, left = _filled(r, pattern)
            e, x = gaps[mine], means[mine]
            n = n + len(e)
            ee = ee + fill @ (e.mT @ e + c @ spread @ c.mT) @ fill.mT + len(e) * left
            ez = ez + fill @ (e.mT @ x - c @ spread)
            zz = zz + x.mT @ x + spread
        return {"rows": n, "ee": ee, "ez": ez, "zz": zz}

    def maximisation(self, expected: Expected) -> DynamicsModel:
        sums, new, held = expected.statistics, self.system, self.fixed
        if "A" not in held and float(sums["steps"]) > 0:
            new = replace(new, A=sums["A"] + _solved(sums["xx"], sums["rx"]))
        if "C" not in held:
            new = replace(new, C=sums["C"] + _solved(sums["zz"], sums["ez"]))
        if "Q" not in held and float(sums["steps"]) > 0:
            new = replace(new, Q=self._raised("Q", self._shaped("Q", _noise_scatter(new, sums) / sums["steps"])))
        if "R" not in held:
            free = self._shaped("R", _scatter(new.C - sums["C"], sums, "ee", "ez", "zz") / sums["rows"])
            new = replace(new, R=self._raised("R", free))
        if "m" not in held:
            new = replace(new, m=sums["m"] + sums["first"] / sums["sequences"])
        if "P" not in held:
            new = replace(new, P=self._raised("P", _first_scatter(new, sums) / sums["sequences"]))
        return replace(self, system=new)

    def _free(self) -> list[str]:
        return [name for name in NAMES if name not in self.fixed]

    def vector(self) -> Tensor:
        """Free matrices; of covariances the Cholesky factor with a logarithmic diagonal."""
        parts = []
        for name in self._free():
            value: Tensor = getattr(self.system, name)
            if name in "QRP":
                root = torch.linalg.cholesky(value)
                value = root.tril(-1) + root.diagonal().log().diag()
            parts.append(value.flatten())
        return torch.cat(parts)

    def with_vector(self, vector: Tensor) -> DynamicsModel:
        found, begin = {}, 0
        for name in self._free():
            like: Tensor = getattr(self.system, name)
            value = vector[begin : begin + like.numel()].reshape(like.shape)
            begin += like.numel()
            if name in "QRP":
                root = value.tril(-1) + value.diagonal().exp().diag()
                value = root @ root.mT
            found[name] = self._raised(name, value)
        return replace(self, system=replace(self.system, **found))

    def _shaped(self, name: str, covariance: Tensor) -> Tensor:
        return covariance.diagonal().diag() if name in self.diagonal else (covariance + covariance.mT) / 2

    def _raised(self, name: str, covariance: Tensor) -> Tensor:
        """With variances no smaller than `least`; matrices that are no covariances as they are."""
        if name not in self.least:
            return covariance
        if name in self.diagonal:
            return torch.maximum(covariance.diagonal(), self.least[name]).diag()
        return raised(covariance, self.least[name], full=True)

    def with_least(self, noise: Tensor, share: float) -> DynamicsModel:
        """For a fit: R no smaller than this (D,), and Q and P than a share of where they start."""
        least = {"R": noise, "Q": share * self.system.Q.diagonal(), "P": share * self.system.P.diagonal()}
        held = replace(self, least={name: value for name, value in least.items() if name not in self.fixed})
        return replace(held, system=replace(self.system, R=held._raised("R", self.system.R)))

    def log_joint(self, expected: Expected) -> Tensor:
        """Of the parts that are fitted; what is held is constant, and left out."""
        sums, system = expected.statistics, self.system
        total = expected.entropy.new_zeros(())
        if not {"A", "Q"} <= self.fixed:
            total = total + _log_normal("Q", system.Q, _noise_scatter(system, sums), sums["steps"])
        if not {"C", "R"} <= self.fixed:
            scatter = _scatter(system.C - sums["C"], sums, "ee", "ez", "zz")
            total = total + _log_normal("R", system.R, scatter, sums["rows"])
        if not {"m", "P"} <= self.fixed:
            total = total + _log_normal("P", system.P, _first_scatter(system, sums), sums["sequences"])
        return total


def _sum_of(matrices: Tensor, weights: Tensor) -> Tensor:
    """sum over t and b of w (T, B) times matrices (T, B or 1, i, j)."""
    shared = weights if matrices.shape[1] == weights.shape[1] else weights.sum(1, keepdim=True)
    return torch.einsum("tb,tbij->ij", shared, matrices)


def _filled(noise: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """F and its remaining covariance: E[e | e_seen] = F e, with R_ms R_ss^-1 for missing entries."""
    if bool(seen.all()):
        return torch.eye(len(noise), dtype=noise.dtype, device=noise.device), torch.zeros_like(noise)
    known = noise[seen][:, seen]
    rule = torch.linalg.solve(known, noise[seen]).mT
    fill = torch.zeros_like(noise)
    fill[:, seen] = rule
    left = noise - rule @ noise[seen]
    left = torch.where(seen[:, None] | seen, torch.zeros_like(left), left)
    fill[seen] = torch.eye(len(noise), dtype=noise.dtype, device=noise.device)[seen]
    return fill, (left + left.mT) / 2


def _solved(squares: Tensor, products: Tensor) -> Tensor:
    """products squares^-1."""
    solved: Tensor = torch.linalg.solve(squares, products.mT)
    return solved.mT


def _scatter(move: Tensor, sums: Sums, square: str, cross: str, inner: str) -> Tensor:
    """sum of (r - move x)(r - move x)^T."""
    mixed = move @ sums[cross].mT
    return sums[square] - mixed - mixed.mT + move @ sums[inner] @ move.mT


def _noise_scatter(system: System, sums: Sums) -> Tensor:
    """sum of w w^T, w = G^+ r."""
    inverse: Tensor = torch.linalg.pinv(system.G)
    return inverse @ _scatter(system.A - sums["A"], sums, "rr", "rx", "xx") @ inverse.mT


def _first_scatter(system: System, sums: Sums) -> Tensor:
    """sum of (x_1 - m)(x_1 - m)^T."""
    move = system.m - sums["m"]
    cross = move[:, None] * sums["first"]
    return sums["first2"] - cross - cross.mT + sums["sequences"] * move[:, None] * move


def _log_normal(name: str, covariance: Tensor, scatter: Tensor, count: Tensor) -> Tensor:
    """sum of log N(r | 0, covariance)."""
    root, info = torch.linalg.cholesky_ex(covariance)
    if bool(info):
        raise OptionError(
            f"{name} is singular, and EM is to fit it",
            expected="a positive definite start",
            got="a covariance without an inverse",
            do=f'hold it (fixed=("{name}",)), or give noise to some directions only (G=)',
        )
    size = 2 * root.diagonal().log().sum() + len(root) * math.log(2 * math.pi)
    total: Tensor = -0.5 * (count * size + torch.cholesky_solve(scatter, root).diagonal().sum())
    return total
