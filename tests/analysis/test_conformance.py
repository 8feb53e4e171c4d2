"""`check` against an energy of one's own: right, and broken on purpose in every way there is."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import etdyn as ed
from etdyn import problems
from etdyn.analysis.conformance import check

DIM, TOKENS = 6, 4
FLOAT64 = torch.float64


class Agreement(ed.Energy):
    """An energy of one's own, as complete as etdyn can use it: tokens align or oppose.

        E = -sum_{c != b} log cosh(g_c . W g_b)

    A token acts in two roles, first and second factor, and the force has a part from each.
    """

    name = "agreement"

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) / dim)

    def scores(self, g):
        """g_c . W g_b, zero for pairs that do not exist, `(batch, c, b)`."""
        pairs = ~torch.eye(g.shape[1], dtype=torch.bool, device=g.device)
        if self._tokens is not None:
            pairs = pairs & self._tokens[:, :, None] & self._tokens[:, None, :]
        if self._keys is not None:
            pairs = pairs & self._keys
        return (g @ self.weight) @ g.mT * pairs, pairs

    def energy_and_force(self, g, relative=False):
        """See `Energy`. Zero at zero weights, so that `relative` is idle."""
        s, _ = self.scores(g)
        log_cosh = s.abs() + torch.log1p(torch.exp(-2 * s.abs())) - math.log(2)
        t = s.tanh()
        return -log_cosh.sum((1, 2)), t @ (g @ self.weight.T) + t.mT @ (g @ self.weight)

    def hvp(self, g, u):
        """The Hessian of E at g times u."""
        s, pairs = self.scores(g)
        t, w = s.tanh(), self.weight
        dt = (1 - t * t) * ((u @ w) @ g.mT + (g @ w) @ u.mT) * pairs
        return -(dt @ (g @ w.T) + t @ (u @ w.T) + dt.mT @ (g @ w) + t.mT @ (u @ w))


def system_of(energy, dynamics="et", lagrangian=None):
    torch.manual_seed(1)
    lagrangian = ed.LayerNorm(DIM) if lagrangian is None else lagrangian
    if isinstance(lagrangian, ed.LayerNorm):
        with torch.no_grad():
            lagrangian.delta.normal_(std=0.3)
    return ed.System(lagrangian, energy(DIM), dynamics)


def failures(system, **arguments):
    return set(check(system, **({"tokens": TOKENS} | arguments)).failures)


class Broken(Agreement):
    """A mutant whose Hessian follows its force, so that only what is broken shows."""

    def hvp(self, g, u):
        return -torch.autograd.functional.jvp(self.force, g, u)[1]


class WrongSign(Broken):
    def energy_and_force(self, g, relative=False):
        energy, force = super().energy_and_force(g)
        return energy, -force


class MissingKeyRole(Broken):
    def energy_and_force(self, g, relative=False):
        t = self.scores(g)[0].tanh()
        return super().energy_and_force(g)[0], t @ (g @ self.weight.T)


class SummedOverBatch(Broken):
    def energy_and_force(self, g, relative=False):
        energy, force = super().energy_and_force(g)
        return energy.sum(), force


class OverTheBatch(Broken):
    """The scale of a sample's energy comes from the whole batch."""

    def energy_and_force(self, g, relative=False):
        energy, force = super().energy_and_force(g)
        factor = 1 + g.detach().square().mean()
        return factor * energy, factor * force


class Float32Inside(Agreement):
    def energy_and_force(self, g, relative=False):
        half = copy.copy(self)
        half._parameters = {"weight": self.weight.float()}
        energy, force = Agreement.energy_and_force(half, g.float())
        return energy.to(g.dtype), force.to(g.dtype)

    hvp = Broken.hvp


class InfiniteAlone(Broken):
    """Has the logarithm of the number of other tokens, which one token has none of."""

    def energy_and_force(self, g, relative=False):
        energy, force = super().energy_and_force(g)
        count = torch.ones_like(g[..., 0]) if self._tokens is None else self._tokens.to(g.dtype)
        constant = torch.log(count.sum(1) - 1)
        return energy if relative else energy + constant, force


class Remembers(Broken):
    """The energy grows with every call."""

    def __init__(self, dim):
        super().__init__(dim)
        self.register_buffer("calls", torch.zeros(()))

    def energy(self, g, relative=False):
        self.calls += 1
        return super().energy(g, relative) + 1e-6 * self.calls.to(g.dtype)


class WritesIntoItsInput(Agreement):
    def force(self, g):
        force = super().force(g)
        with torch.no_grad():
            g.mul_(1.0 + 1e-15)
        return force


class Dropout(Broken):
    def energy_and_force(self, g, relative=False):
        energy, force = super().energy_and_force(g)
        keep = nn.functional.dropout(torch.ones_like(energy), 0.5, self.training)
        return energy * keep, force * keep[:, None, None]


class WrongRelative(Broken):
    def energy_and_force(self, g, relative=False):
        energy, force = super().energy_and_force(g)
        return (energy - 0.01 * self.keep(g).square().sum((1, 2)) if relative else energy), force


class WrongHessian(Agreement):
    def hvp(self, g, u):
        return 1.01 * super().hvp(g, u)


class Disagrees(Broken):
    def energy(self, g, relative=False):
        return super().energy(g, relative) + 1e-3


class LowBound(Broken):
    def curvature_bound(self, tokens):
        return 0.0


class PlainTensor(Broken):
    """A constant that no `.double()` reaches."""

    def __init__(self, dim):
        super().__init__(dim)
        self.constant = torch.linspace(0, 1, dim)

    def energy_and_force(self, g, relative=False):
        energy, force = super().energy_and_force(g)
        return energy - g.sum(1) @ self.constant, force + self.constant


class PromotedConstant(Broken):
    """A float32 constant that promotion hides."""

    def energy_and_force(self, g, relative=False):
        energy, force = super().energy_and_force(g)
        tilt = self.keep(torch.linspace(0, 1, g.shape[2]).to(g.dtype).expand_as(g))
        return energy - (g * tilt).sum((1, 2)), force + tilt


class AlwaysFloat64(Broken):
    def energy_and_force(self, g, relative=False):
        energy, force = super().energy_and_force(g)
        return energy.double(), force


class DetachedForce(Broken):
    def energy_and_force(self, g, relative=False):
        fixed = copy.copy(self)
        fixed._parameters = {"weight": self.weight.detach()}
        return super().energy_and_force(g)[0], Agreement.energy_and_force(fixed, g)[1]


class UnusedParameter(Broken):
    def __init__(self, dim):
        super().__init__(dim)
        self.bias = nn.Parameter(torch.zeros(dim))


class IgnoresMasks(Broken):
    def _set_masks(self, tokens, keys):
        pass


class MaskedMean(Broken):
    """Divides by all tokens, absent ones too."""

    def energy_and_force(self, g, relative=False):
        energy, force = super().energy_and_force(g)
        return energy / g.shape[1], force / g.shape[1]


class AutogradForce(Broken):
    """A force made with torch.autograd.grad, which no_grad switches off."""

    def force(self, g):
        g = g if g.requires_grad else g.detach().requires_grad_()
        energy = super().energy_and_force(g)[0].sum()
        return -torch.autograd.grad(energy, g, create_graph=True)[0]


class UnfitName(Broken):
    name = "my energy"


class VectorGamma(ed.LayerNorm):
    """A gamma for each feature, as torch.nn.LayerNorm has it."""

    def activation(self, x):
        scale = torch.linspace(0.5, 1.5, self.dim, dtype=x.dtype)
        return scale * super().activation(x)


class NegativeGamma(ed.LayerNorm):
    @property
    def gamma(self):
        return -super().gamma


class WrongMetric(ed.LayerNorm):
    def metric(self, x, v):
        return 1.1 * super().metric(x, v)


class WrongRoot(ed.LayerNorm):
    def metric_root(self, x, v):
        return self.metric(x, v)


class WrongLegendre(ed.LayerNorm):
    def legendre(self, x):
        return 2 * super().legendre(x)


class WrongTangent(ed.LayerNorm):
    def tangent(self, x, v):
        return 2 * super().tangent(x, v)


class Terms(ed.EnergySum):
    """A sum that forgets a share of itself."""

    def energy(self, g, relative=False):
        return 0.9 * super().energy(g, relative)


SIGN, PART, SLOPE = "force = -grad E", "force has no curl", "dissipation = -dE/dt"
FALLS, SPECTRUM, HESSIAN = "energy falls", "spectrum is real", "force_jvp = d force"
BATCH, MASKS, TRACE = "batch independent", "masks take tokens out", "same call, same bits"
MODES, PASSES, DIGITS = "same in every mode", "energy_and_force agree", "float64 throughout"
DTYPE, REACH, SUM = "dtype and device kept", "gradients reach parameters", "terms sum up"
GRADIENT, METRIC, SYMMETRIC = "g = grad L", "M = dg/dx", "dg/dx symmetric"
CONVEX, ROOT, LEGENDRE = "dg/dx >= 0", "M^1/2 twice = M", "x.g - L = L*(g)"

# What each mutant turns red: its own line first, then what follows from it and cannot be avoided.
MUTANTS = {
    WrongSign: {SIGN, SLOPE, FALLS},
    MissingKeyRole: {SIGN, PART, SPECTRUM, SLOPE, FALLS},
    WrongHessian: {HESSIAN},
    WrongRelative: {"relative energy"},
    LowBound: {"curvature bound"},
    SummedOverBatch: {"shapes", BATCH, SLOPE},  # no slope of one number is (batch,)
    Disagrees: {PASSES},
    UnfitName: {SUM},
    OverTheBatch: {BATCH, MASKS},  # absent tokens count in what is taken over the batch
    Remembers: {TRACE, MODES, PASSES, SUM, BATCH, MASKS},
    WritesIntoItsInput: {TRACE, REACH, PART, HESSIAN, SPECTRUM},  # which autograd refuses
    AutogradForce: {MODES, FALLS},  # `solve` runs without gradients
    InfiniteAlone: {"finite at the edges"},
    PlainTensor: {DTYPE},
    AlwaysFloat64: {DTYPE},
    Float32Inside: {DIGITS, SIGN, PART, SPECTRUM, SLOPE, BATCH, MASKS},  # to 1e-7 all is true
    PromotedConstant: {DIGITS},
    DetachedForce: {REACH},
    UnusedParameter: {REACH},
    IgnoresMasks: {MASKS},
    MaskedMean: {MASKS},
}
LAGRANGIANS = {
    VectorGamma: {SYMMETRIC, CONVEX, GRADIENT, METRIC, LEGENDRE, SLOPE, SPECTRUM},
    NegativeGamma: {CONVEX, ROOT, LEGENDRE, "dissipation >= 0", FALLS},
    WrongMetric: {METRIC, ROOT, SLOPE},
    WrongRoot: {ROOT},
    WrongLegendre: {LEGENDRE},
    WrongTangent: {"P projects", ROOT},  # the root is made of the projection
}


@pytest.mark.parametrize("dynamics", ["et", "leaky", "sphere"])
def test_an_energy_of_ones_own_passes(dynamics):
    result = check(system_of(Agreement, dynamics), tokens=TOKENS)
    assert result.passed, result
    assert all(v.applies for v in result.verdicts)
    assert check(system_of(Broken, dynamics), tokens=TOKENS).passed  # so are the mutants unbroken


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_a_broken_energy_turns_its_line_red(mutant):
    assert failures(system_of(mutant)) == MUTANTS[mutant]


@pytest.mark.parametrize("mutant", LAGRANGIANS, ids=lambda m: m.__name__)
def test_a_broken_lagrangian_turns_its_line_red(mutant):
    """ET-F2, F11: a gamma per feature or below zero, and verbs that do not fit the others."""
    assert failures(system_of(Agreement, lagrangian=mutant(DIM))) == LAGRANGIANS[mutant]


def test_every_law_has_a_mutant_that_breaks_it():
    broken = set().union(*MUTANTS.values(), *LAGRANGIANS.values())
    assert broken == {v.law for v in check(system_of(Agreement), tokens=2).verdicts}


def test_dropout_is_found_and_its_verdicts_repeat():
    """What is random breaks nearly every law, but in the same way each time."""
    first = check(system_of(Dropout), tokens=TOKENS, seed=3)
    assert {TRACE, MODES, BATCH} <= set(first.failures)
    torch.rand(1)
    again = check(system_of(Dropout), tokens=TOKENS, seed=3)
    assert str(again) == str(first)


def test_terms_must_sum_to_the_whole():
    terms = Terms({"agreement": Agreement(DIM), "hopfield": ed.Hopfield(DIM, 9)})
    assert SUM in failures(ed.System(ed.LayerNorm(DIM), terms))


@pytest.mark.parametrize("dynamics", ["leaky", "sphere"])
def test_the_sign_and_the_roles_are_found_under_every_dynamics(dynamics):
    assert failures(system_of(WrongSign, dynamics)) >= {SIGN, SLOPE}
    assert failures(system_of(MissingKeyRole, dynamics)) >= {SIGN, PART, SPECTRUM, SLOPE}


def test_et_f12_a_missing_role_has_complex_eigenvalues():
    verdicts = {v.law: v for v in check(system_of(MissingKeyRole), tokens=TOKENS).verdicts}
    imaginary = float(verdicts[SPECTRUM].detail.split("eigenvalue ")[1].split(",")[0])
    assert imaginary > 0.1


KINDS = list(itertools.product(("relu", "power", "softmax"), (False, True)))


@pytest.mark.parametrize("dynamics", ["et", "leaky", "sphere"])
@pytest.mark.parametrize(("kind", "self_attention"), KINDS)
def test_shipped_energies_pass(dynamics, kind, self_attention):
    torch.manual_seed(0)
    system = ed.EnergyTransformer(
        DIM, 2, 3, 9, dynamics, hopfield=kind, self_attention=self_attention
    )
    result = check(system, tokens=TOKENS)  # float32
    assert result.passed, result
    assert "the system is float32" in str(result)


EXACT = {
    "linear": (lambda: problems.linear(torch.eye(3, 6, dtype=FLOAT64), ones(3, 6)).system, 3),
    "one memory": (lambda: problems.single_memory().system, 1),
    "well": (lambda: problems.anisotropic_well(ones(3, 4)[0], ones(3, 4)).system, 3),
    "Curie-Weiss": (lambda: problems.curie_weiss(6, 1.5).system, 6),
    "two tokens": (lambda: problems.two_tokens(torch.arange(1.0, 4, dtype=FLOAT64)).system, 2),
    "spins": (lambda: system_of(Agreement, "leaky", ed.IsingSpin(DIM, 2.0)), TOKENS),
    "quadratic": (lambda: system_of(Agreement, "et", ed.Quadratic(DIM)), TOKENS),
}


def ones(*shape):
    return torch.ones(1, *shape, dtype=FLOAT64)


@pytest.mark.parametrize("name", EXACT)
def test_exact_problems_and_other_lagrangians_pass(name):
    build, tokens = EXACT[name]
    result = check(build(), tokens=tokens)
    assert result.passed, result


def test_a_coupling_is_held_to_what_it_claims():
    coupling = problems.linear_flow(torch.randn(4, 4, dtype=FLOAT64), ones(4, 3)).system
    result = check(coupling, tokens=4)
    assert result.passed, result
    silent = {v.law for v in result.verdicts if not v.applies}
    assert silent == {SIGN, PART, "relative energy", "curvature bound", SPECTRUM, SLOPE,
                      "dissipation >= 0", FALLS, PASSES}  # fmt: skip
    assert "not measured: no energy is claimed" in str(result)


def test_masked_systems_are_checked_with_their_masks():
    system = system_of(Agreement, "leaky")
    tokens = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    keys = torch.rand(1, TOKENS, TOKENS) < 0.5
    for masked in (system.masked(tokens), system.masked(keys=keys), system.masked(tokens, keys)):
        result = check(masked)
        assert result.passed, result
    assert check(system.masked(tokens)).to_xarray().attrs["etdyn_config"].count("[3, 4, 6]") == 1


@pytest.mark.parametrize("dynamics", ["leaky", "sphere"])
def test_equilibria_raise_no_false_alarm(dynamics):
    """Where velocity and dissipation vanish, what is left of them is rounding."""
    torch.manual_seed(0)
    system = ed.EnergyTransformer(DIM, 2, 3, 9, dynamics, hopfield="softmax").double()
    found = ed.find_equilibrium(system, torch.randn(2, TOKENS, DIM, dtype=FLOAT64))
    assert found.converged.all()
    result = check(system, found.x)
    assert result.passed, result


def test_states_of_ones_own_are_used():
    torch.manual_seed(0)
    system = system_of(Agreement)
    for x in (torch.randn(1, 1, DIM), torch.randn(1, 3, DIM), torch.randn(20, 2, DIM)):
        result = check(system, x.requires_grad_())
        assert result.passed, result
        assert f"{min(len(x), 8)} states of {x.shape[1]} tokens" in str(result)


def test_an_undocumented_refusal_and_eps_zero_are_seen():
    """Spheres refuse constant tokens; without eps the published flow says NaN there."""
    verdict = {v.law: v for v in check(system_of(Agreement, "sphere")).verdicts}
    assert verdict["finite at the edges"].detail == "refused: zero, constant tokens"
    bare = ed.System(ed.LayerNorm(DIM, eps=0.0), Agreement(DIM))
    result = check(bare, tokens=TOKENS)
    assert result.failures == ("finite at the edges",)
    assert "constant tokens (float64)" in str(result)


def test_the_system_and_the_generators_stay_as_they_are():
    system = system_of(Remembers).train()
    before = copy.deepcopy(system.state_dict())
    state = torch.get_rng_state()
    with torch.no_grad():
        check(system, tokens=TOKENS)
    assert torch.equal(torch.get_rng_state(), state)
    assert system.training and all(p.requires_grad for p in system.parameters())
    assert all(p.grad is None for p in system.parameters())
    after = system.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items() if "calls" not in k)
    assert {t.dtype for t in after.values()} == {torch.float32}


def test_verdicts_are_a_dataset_that_survives_the_disk(tmp_path):
    result = check(system_of(MissingKeyRole), tokens=TOKENS)
    data = result.to_xarray()
    ed.save(data, tmp_path / "verdicts")
    loaded = ed.load(tmp_path / "verdicts")
    assert loaded.identical(data)
    assert data.attrs["etdyn_schema"] == "etdyn.conformance/1"
    assert set(data.law.values[~data.passed.values]) == set(result.failures)
    measured = data.measured.sel(law=SIGN)
    assert float(measured) > float(data.bound.sel(law=SIGN)) == 1e-10


def test_a_line_each_is_printed():
    result = check(system_of(MissingKeyRole), tokens=TOKENS)
    lines = str(result).splitlines()
    assert sum(line.startswith(("PASS", "FAIL", "  --")) for line in lines) == len(result.verdicts)
    assert repr(result) == str(result)
    assert max(map(len, lines)) <= 120
    assert any("as query and as" in line for line in lines), "a failure says what it means"


def test_wrong_input_raises():
    system = system_of(Agreement)
    with pytest.raises(TypeError, match="system: expected a System"):
        check(Agreement(DIM))
    with pytest.raises(TypeError, match="x: expected dtype"):
        check(system, torch.randn(2, 3, DIM, dtype=FLOAT64))
    with pytest.raises(ValueError, match="x: expected finite"):
        check(system, torch.full((2, 3, DIM), torch.nan))
    with pytest.raises(ValueError, match="tokens: expected an integer >= 1"):
        check(system, tokens=0)
    with pytest.raises(ValueError, match=r"is `tokens` right\?"):
        check(problems.curie_weiss(6, 1.5).system)


def test_a_part_that_is_only_promised_fails():
    class Promised(Agreement):
        def hvp(self, g, u):
            raise NotImplementedError

    found = check(system_of(Promised), tokens=TOKENS)
    assert not found.passed
    assert "force_jvp = d force" in found.failures
    assert "force = -grad E" not in found.failures, "what is there is still judged"
